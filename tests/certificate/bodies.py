"""Writes a conversation as the body of each API, as clients of that API do."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

from tests.certificate.conversations import Call, Conversation, Turn
from tests.support.data.images import image_file

Body = dict[str, Any]
MODEL = "m"
MAX_TOKENS = 64


def _image() -> str:
    return base64.b64encode(image_file(28, 28)).decode()


def _image_url() -> str:
    return f"data:image/png;base64,{_image()}"


def chat(conversation: Conversation) -> Body | None:
    """Chat Completions; reasoning goes back as `reasoning_content` or, for odd numbers, `reasoning`."""
    name = "reasoning" if conversation.number % 2 else "reasoning_content"
    body: Body = {"model": MODEL, "messages": [_chat_message(turn, name) for turn in conversation.turns]}
    if conversation.tools:
        body["tools"] = list(conversation.tools)
    if conversation.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": conversation.thinking, "thinking": conversation.thinking}
    if conversation.effort:
        body["reasoning_effort"] = conversation.effort
    if conversation.continues:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if conversation.schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": conversation.schema}}
    return body


def _chat_message(turn: Turn, reasoning: str) -> Body:
    message: Body = {"role": turn.role}
    if len(turn.texts) > 1 or turn.images:
        message["content"] = [
            *({"type": "image_url", "image_url": {"url": _image_url()}} for _ in range(turn.images)),
            *({"type": "text", "text": text} for text in turn.texts),
        ]
    else:
        message["content"] = turn.texts[0] if turn.texts else "" if turn.reasoning else None
    if turn.reasoning:
        message[reasoning] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.calls
        ]
    if turn.answers:
        message["tool_call_id"] = turn.answers
    return message


def responses(conversation: Conversation) -> Body | None:
    """Responses; a first system message is `instructions` in conversations with even numbers."""
    if conversation.thinking is not None:
        return None
    turns = list(conversation.turns)
    body: Body = {"model": MODEL, "store": False}
    if turns[0].role == "system" and conversation.number % 2 == 0:
        body["instructions"] = turns.pop(0).texts[0]
    body["input"] = [item for turn in turns for item in _items(turn, turn is turns[-1] and conversation.continues)]
    if conversation.tools:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in conversation.tools]
    if conversation.effort:
        body["reasoning"] = {"effort": conversation.effort}
    if conversation.schema is not None:
        body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": conversation.schema}}
    return body


def _items(turn: Turn, open_: bool) -> list[Body]:
    if turn.role == "tool":
        return [{"type": "function_call_output", "call_id": turn.answers, "output": turn.texts[0]}]
    items: list[Body] = []
    if turn.reasoning:
        thoughts = [{"type": "reasoning_text", "text": turn.reasoning}]
        items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": thoughts})
    if turn.role == "assistant" and turn.texts:
        texts = [{"type": "output_text", "text": text, "annotations": []} for text in turn.texts]
        status = "incomplete" if open_ else "completed"
        items.append({"type": "message", "id": "msg_1", "role": "assistant", "status": status, "content": texts})
    elif turn.texts:
        content: list[Body] = [
            {"type": "input_image", "image_url": _image_url(), "detail": "auto"} for _ in range(turn.images)
        ]
        content += [{"type": "input_text", "text": text} for text in turn.texts]
        items.append({"type": "message", "role": turn.role, "content": content})
    items += [
        {"type": "function_call", "id": "fc_1", "call_id": call.id, "name": call.name, "arguments": call.arguments}
        for call in turn.calls
    ]
    return items


def messages(conversation: Conversation) -> Body | None:
    """Messages; has no developer role, and calls are objects, which cannot be cut."""
    turns = list(conversation.turns)
    if any(turn.role == "developer" for turn in turns) or not all(map(_whole, turns)):
        return None
    body: Body = {"model": MODEL, "max_tokens": MAX_TOKENS}
    head = [turn for turn in turns if turn.role == "system"]
    if turns[: len(head)] != head:
        return None
    if head:
        texts = [text for turn in head for text in turn.texts]
        body["system"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    body["messages"] = _joined(turns[len(head) :])
    if conversation.tools:
        functions = [tool["function"] for tool in conversation.tools]
        body["tools"] = [
            {"input_schema" if name == "parameters" else name: value for name, value in function.items()}
            for function in functions
        ]
    if conversation.thinking is not None:
        budget = {"type": "enabled", "budget_tokens": 1024}
        body["thinking"] = budget if conversation.thinking else {"type": "disabled"}
        body["max_tokens"] = 2048
    if conversation.effort:
        body["output_config"] = {"effort": conversation.effort}
    if conversation.schema is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": conversation.schema}}
    return body


def _whole(turn: Turn) -> bool:
    try:
        return all(isinstance(json.loads(call.arguments), dict) for call in turn.calls) and turn.texts != ("",)
    except json.JSONDecodeError:
        return False


def _joined(turns: list[Turn]) -> list[Body]:
    """Messages of user and assistant in turn; the results of tools are the user's."""
    written: list[Body] = []
    for turn in turns:
        role = "user" if turn.role == "tool" else turn.role
        blocks = _blocks(turn)
        if written and written[-1]["role"] == role == "user":
            written[-1]["content"] += blocks
        else:
            written.append({"role": role, "content": blocks})
    for message in written:
        block = message["content"][0]
        if len(message["content"]) == 1 and block["type"] == "text":
            message["content"] = block["text"]
    return written


def _blocks(turn: Turn) -> list[Body]:
    if turn.role == "tool":
        return [{"type": "tool_result", "tool_use_id": turn.answers, "content": turn.texts[0]}]
    source = {"type": "base64", "media_type": "image/png", "data": _image()} if turn.images else {}
    return [
        *([{"type": "thinking", "thinking": turn.reasoning, "signature": ""}] if turn.reasoning else []),
        *({"type": "image", "source": source} for _ in range(turn.images)),
        *({"type": "text", "text": text} for text in turn.texts),
        *(_use(call) for call in turn.calls),
    ]


def _use(call: Call) -> Body:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


def completions(conversation: Conversation) -> Body | None:
    """Completions: the texts of a plain conversation as one prompt."""
    if conversation.feature not in ("plain", "text parts", "structured output"):
        return None
    prompt = "\n".join(text for turn in conversation.turns for text in turn.texts)
    body: Body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS}
    if conversation.schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": conversation.schema}}
    return body


APIS: dict[str, Callable[[Conversation], Body | None]] = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
    "completions": completions,
}
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "completions": "/v1/completions",
}
