"""The fields of a chat request that this API takes, and what they are in OpenAI's."""

from __future__ import annotations

from typing import Any, Literal

import orjson
from pydantic import Field

from sluice.apis import Open, Strict

DEFAULT_OPTIONS = {"num_predict": "max_completion_tokens"}


class CalledFunction(Strict):
    """The function of a call in an earlier message."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Call(Strict):
    """A call in an earlier message."""

    function: CalledFunction


class Message(Strict):
    """A message of the chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None


class Options(Strict):
    """Parameters of the generation."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None


class ChatRequest(Strict):
    """POST /api/chat."""

    model: str = Field(min_length=1)
    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    options: Options | None = None
    think: bool | None = None
    stream: bool = True


class ChatAnswer(Open):
    """A whole answer, or the last line of a stream."""

    model: str
    created_at: str
    message: dict[str, Any]
    done: bool
    done_reason: str
    prompt_eval_count: int
    eval_count: int


def as_openai(fields: ChatRequest) -> dict[str, Any]:
    """Returns the body of a chat completion."""
    body: dict[str, Any] = {"model": fields.model, "messages": _messages(fields.messages)}
    if fields.tools:
        body["tools"] = fields.tools
    if fields.options is not None:
        options = fields.options.model_dump(exclude_none=True)
        body |= {DEFAULT_OPTIONS.get(name, name): value for name, value in options.items()}
    if fields.think is not None:
        body["chat_template_kwargs"] = {"enable_thinking": fields.think}
    return body


def _messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Returns the messages; calls get ids, which Ollama's answers name by their order."""
    converted: list[dict[str, Any]] = []
    open_calls: list[str] = []
    for number, message in enumerate(messages):
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            entry["reasoning_content"] = message.thinking
        if message.tool_calls:
            entry["tool_calls"] = []
            for index, call in enumerate(message.tool_calls):
                open_calls.append(f"call_{number}_{index}")
                function = {"name": call.function.name, "arguments": orjson.dumps(call.function.arguments).decode()}
                entry["tool_calls"].append({"id": open_calls[-1], "type": "function", "function": function})
        if message.role == "tool":
            entry["tool_call_id"] = open_calls.pop(0) if open_calls else f"call_{number}"
        converted.append(entry)
    return converted
