"""Tool calls and reasoning with the official client; the mock says what its script demands, in the model's markup."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionToolMessageParam

from tests.support.clients.chat_answers import ObservedStream
from tests.support.servers.suite import Suite

CITY = '{"city": "Zürich 🌧️", "days": [1, 2.50]}'
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
    for name in ("get_weather", "get_time")
]
MISTRAL = f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "get_time", "arguments": {{}}}}]'


def asking(script: str) -> Any:
    """A conversation that the mock answers with the script."""
    return [{"role": "user", "content": f"Do it. <<<script: {script}>>>"}]


@pytest.fixture(scope="module")
def mistral(suite: Suite) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{suite.url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def test_parallel_calls_at_once_and_streamed(mistral: openai.OpenAI) -> None:
    arguments: Any = {"model": "tekken", "messages": asking(MISTRAL), "tools": TOOLS, "max_tokens": 400}
    whole = mistral.chat.completions.create(**arguments).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    calls: Any = whole.message.tool_calls
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [
        ("function", "get_weather", CITY),
        ("function", "get_time", "{}"),
    ]
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)
    assert len({call.id for call in calls}) == 2

    for _ in range(20):  # what comes while a busy gateway waits for its turn is one chunk
        heard = ObservedStream(
            mistral.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
        )
        if heard.argument_chunks > 2:
            break
    assert heard.finish_reason == "tool_calls"
    assert heard.content == ""
    assert [(call["name"], call["arguments"]) for call in heard.calls.values()] == [
        ("get_weather", CITY),
        ("get_time", "{}"),
    ]
    assert heard.argument_chunks > 2, "arguments are told as they come"
    assert heard.usage.completion_tokens > 20


def test_the_answer_to_a_call_can_be_sent_back(mistral: openai.OpenAI) -> None:
    question = asking(MISTRAL)
    first: Any = mistral.chat.completions.create(model="tekken", messages=question, tools=TOOLS).choices[0].message
    results: list[ChatCompletionToolMessageParam] = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in first.tool_calls
    ]
    answer = mistral.chat.completions.create(
        model="tekken", messages=[question[0], first.to_dict(), *results], tools=TOOLS, max_tokens=40
    )
    assert answer.choices[0].message.role == "assistant"


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_there_are_no_calls(mistral: openai.OpenAI, more: Any) -> None:
    choice = mistral.chat.completions.create(model="tekken", messages=asking(MISTRAL), **more).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert choice.message.content == MISTRAL.removeprefix("[TOOL_CALLS]")


def test_one_call_only(mistral: openai.OpenAI) -> None:
    raw = mistral.chat.completions.with_raw_response.create(
        model="tekken", messages=asking(MISTRAL), tools=TOOLS, parallel_tool_calls=False
    )
    choice: Any = raw.parse().choices[0]
    assert raw.headers["x-sluice-degraded"] == "tool_choice_not_honoured"
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    assert "get_time" in choice.message.content
    assert choice.degraded == ["tool_choice_not_honoured"]
