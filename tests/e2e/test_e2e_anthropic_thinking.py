"""A model that thinks, through the official clients of Anthropic's messages and of OpenAI's responses and chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.clients.chat_answers import ObservedStream
from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.suite import Suite

CITY = '{"city": "Zürich 🌧️", "days": [1, 2.50]}'
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMES = ("get_weather", "get_time")
FUNCTIONS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
TOOLS: Any = [{"name": name, "description": "Asks.", "input_schema": SCHEMA} for name in NAMES]
HERMES = (
    f'<think>\nLet me see.\n</think>\n\nI look.\n<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n'
    '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


def asking(script: str) -> Any:
    """A conversation that the mock answers with the script."""
    return [{"role": "user", "content": f"Do it. <<<script: {script}>>>"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model whose template knows thinking, and writes calls as Hermes and Qwen do."""
    model = build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with Suite("--speedup", "20", "--workers", "1", "--model", str(model)) as running:
        yield running.url


@pytest.fixture(scope="module")
def thinking(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def responding(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def test_thinking_and_calls_in_their_order(thinking: anthropic.Anthropic) -> None:
    arguments: Any = {
        "model": "tiny",
        "max_tokens": 2000,
        "messages": asking(HERMES),
        "tools": TOOLS,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    whole = thinking.messages.create(**arguments)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    first: Any = whole.content[0]
    assert (first.thinking, bool(first.signature)) == ("Let me see.", True)
    details = whole.usage.output_tokens_details
    assert details is not None
    assert 0 < details.thinking_tokens < whole.usage.output_tokens
    with thinking.messages.stream(**arguments) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    assert [block.to_dict() for block in final.content if block.type == "thinking"] == [first.to_dict()]
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]

    results: Any = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "ok"}
        for block in final.content
        if block.type == "tool_use"
    ]
    arguments["messages"] = [
        *asking(HERMES),
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": results},
    ]
    assert thinking.messages.create(**{**arguments, "max_tokens": 1500}).content


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_told_only_when_asked_for(thinking: anthropic.Anthropic, stream: bool) -> None:
    def said(**more: Any) -> list[Any]:
        arguments: Any = {"model": "tiny", "max_tokens": 1500, "messages": asking("<think>a b</think>c d"), **more}
        if not stream:
            message: anthropic.types.Message = thinking.messages.create(**arguments)
            return list(message.content)
        with thinking.messages.stream(**arguments) as events:
            return events.get_final_message().content

    assert [block.type for block in said()] == ["text"]
    assert [block.type for block in said(thinking={"type": "disabled"})] == ["text"]
    assert [block.type for block in said(thinking={"type": "adaptive"})] == ["thinking", "text"]
    omitted = said(thinking={"type": "adaptive", "display": "omitted"})
    assert [(block.type, getattr(block, "thinking", None)) for block in omitted] == [("thinking", ""), ("text", None)]
    assert omitted[0].signature


def test_only_hints_that_the_template_does_not_read_are_reported(thinking: anthropic.Anthropic) -> None:
    answer = thinking.messages.with_raw_response.create(
        model="tiny",
        max_tokens=100,
        messages=asking("<think>a b</think>c d"),
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
    )
    assert answer.headers["x-sluice-degraded"] == "no_effect:output_config.effort"
    assert [block.type for block in answer.parse().content] == ["thinking", "text"]


RESPONSE_FUNCTIONS: Any = [
    {"type": "function", "name": name, "parameters": SCHEMA, "strict": False, "description": "Asks."} for name in NAMES
]


@pytest.mark.parametrize("summary", [None, "auto"])
def test_reasoning_items_and_calls_of_a_response(responding: openai.OpenAI, summary: Any) -> None:
    question: Any = asking(HERMES)
    arguments: Any = {
        "model": "tiny",
        "input": question,
        "tools": RESPONSE_FUNCTIONS,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": summary} if summary else None,
        "store": False,
    }
    whole: Any = responding.responses.create(**arguments)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    thought = whole.output[0]
    told = thought.summary if summary else thought.content
    assert [part.text for part in told] == ["Let me see."]
    assert whole.output_text == "I look."
    assert [(call.name, json.loads(call.arguments)) for call in whole.output[2:]] == [
        ("get_weather", json.loads(CITY)),
        ("get_time", {}),
    ]
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens

    events: Any = list(responding.responses.create(**arguments, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response

    def plain(response: Any) -> list[dict[str, Any]]:
        drop = ("id", "call_id")
        return [{name: said for name, said in item.to_dict().items() if name not in drop} for item in response.output]

    assert plain(final) == plain(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in final.output]
    kind = "reasoning_summary_text" if summary else "reasoning_text"
    kinds = [event.type for event in events]
    assert f"response.{kind}.delta" in kinds
    assert f"response.{kind}.done" in kinds
    assert ("response.reasoning_summary_part.added" in kinds) == bool(summary)

    # Nothing is kept, so the client sends everything itself, reasoning included.
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in final.output
        if item.type == "function_call"
    ]
    sent = [item.to_dict() for item in final.output]
    answer = responding.responses.create(**{**arguments, "input": [*question, *sent, *results]})
    assert answer.status in ("completed", "incomplete")


def test_reasoning_and_calls_of_a_thinking_model(responding: openai.OpenAI) -> None:
    arguments: Any = {"model": "tiny", "messages": asking(HERMES), "tools": FUNCTIONS, "max_tokens": 600}
    answer: Any = responding.chat.completions.create(**arguments)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.reasoning) == ("Let me see.", "Let me see.")
    assert message.content == "I look."
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("get_weather", CITY),
        ("get_time", "{}"),
    ]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens

    heard = ObservedStream(
        responding.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    )
    assert (heard.reasoning, heard.content) == ("Let me see.", "I look.")
    assert [json.loads(call["arguments"]) for call in heard.calls.values()] == [json.loads(CITY), {}]
    assert heard.usage.completion_tokens_details == answer.usage.completion_tokens_details


def test_thinking_switched_off_leaves_no_reasoning(responding: openai.OpenAI) -> None:
    script = "<think>is a tag</think> and so on"
    answer: Any = responding.chat.completions.create(
        model="tiny", messages=asking(script), extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert answer.choices[0].message.content == script
    assert answer.choices[0].message.reasoning_content is None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
