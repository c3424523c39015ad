"""Every answer and every event against the official clients' own types, in strict mode, and in the documented order."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic.types
import httpx
import openai.types
import openai.types.chat
import openai.types.responses
import pytest
from pydantic import TypeAdapter

from tests.support.servers.suite import Suite

CALLS = '[TOOL_CALLS] [{"name": "f", "arguments": {"x": "ü 🌧"}}, {"name": "g", "arguments": {}}]'
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
MODEL = {"model": "tekken"}
CHUNK: TypeAdapter[Any] = TypeAdapter(openai.types.chat.ChatCompletionChunk)
CHAT: TypeAdapter[Any] = TypeAdapter(openai.types.chat.ChatCompletion)
COMPLETION: TypeAdapter[Any] = TypeAdapter(openai.types.Completion)
RESPONSE: TypeAdapter[Any] = TypeAdapter(openai.types.responses.Response)
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseStreamEvent)
MESSAGE: TypeAdapter[Any] = TypeAdapter(anthropic.types.Message)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)


def chat(script: str, **more: Any) -> dict[str, Any]:
    return {**MODEL, "messages": [{"role": "user", "content": f"<<<script: {script}>>>"}], "max_tokens": 60, **more}


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in names]


CHATS = {
    "text": chat("Hello there."),
    "calls": chat(CALLS, tools=tools("f", "g")),
    "log-probabilities": chat("Hello there.", logprobs=True, top_logprobs=2),
    "choices": chat("Hello there.", n=2),
    "cut": chat("Hello there.", max_tokens=2),
    "schema": chat(
        "x", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    ),
}
COMPLETIONS = {
    "text": {**MODEL, "prompt": "Once", "max_tokens": 9},
    "log-probabilities": {**MODEL, "prompt": "Once", "max_tokens": 9, "logprobs": 2},
    "prompts": {**MODEL, "prompt": ["Once", "Twice"], "max_tokens": 9, "n": 2},
    "lists of ids": {**MODEL, "prompt": [[1, 1097], [1, 1098]], "max_tokens": 9},
}
FUNCTIONS = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in ("f", "g")]
RESPONSES: dict[str, dict[str, Any]] = {
    "text": {**MODEL, "input": "<<<script: Hello there.>>>"},
    "calls": {**MODEL, "input": f"<<<script: {CALLS}>>>", "tools": FUNCTIONS},
    "log-probabilities": {**MODEL, "input": "Hi.", "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    "cut": {**MODEL, "input": "Hi.", "max_output_tokens": 2},
}
MESSAGES = {
    "text": chat("Hello there."),
    "calls": chat(CALLS, tools=[{"name": name, "input_schema": SCHEMA} for name in ("f", "g")]),
    "cut": chat("Hello there.", max_tokens=2),
}


def whole(suite: Suite, path: str, body: dict[str, Any]) -> bytes:
    answer = httpx.post(suite.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.content


def streamed(suite: Suite, path: str, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Event and data of every event, which have to be separated as the standard says."""
    answer = httpx.post(suite.url + path, json={**body, "stream": True}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].split(";")[0] == "text/event-stream"
    assert answer.text.endswith("\n\n")
    found = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        read = re.fullmatch(r"(?:event: ([^\n]+)\n)?data: ([^\n]+)", event)
        assert read, event
        found.append((read[1] or "", read[2]))
    return found


@pytest.mark.parametrize("name", CHATS)
def test_chats(suite: Suite, name: str) -> None:
    answer = CHAT.validate_json(whole(suite, "/v1/chat/completions", CHATS[name]), strict=True)
    body = {**CHATS[name], "stream_options": {"include_usage": True}}
    events = streamed(suite, "/v1/chat/completions", body)
    assert events[-1] == ("", "[DONE]")
    assert {event for event, _ in events} == {""}
    chunks = [CHUNK.validate_json(data, strict=True) for _, data in events[:-1]]
    assert {(chunk.id, chunk.object) for chunk in chunks} == {(chunks[0].id, "chat.completion.chunk")}
    assert [len(chunk.choices) for chunk in chunks] == [1] * (len(chunks) - 1) + [0]
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    for choice in answer.choices:
        of_choice = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        assert of_choice[0].delta.role == "assistant"
        assert {one.delta.role for one in of_choice[1:]} <= {None}
        assert [one.finish_reason for one in of_choice] == [None] * (len(of_choice) - 1) + [choice.finish_reason]
        assert "".join(one.delta.content or "" for one in of_choice) == (choice.message.content or "")
        calls = [call for one in of_choice for call in one.delta.tool_calls or []]
        begun = [call for call in calls if call.id]
        assert [call.index for call in begun] == list(range(len(choice.message.tool_calls or [])))
        assert [call.function.name for call in begun] == [one.function.name for one in choice.message.tool_calls or []]
        assert all(call.function.name is None and call.type is None for call in calls if not call.id)


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions(suite: Suite, name: str) -> None:
    answer = COMPLETION.validate_json(whole(suite, "/v1/completions", COMPLETIONS[name]), strict=True)
    body = {**COMPLETIONS[name], "stream_options": {"include_usage": True}}
    events = streamed(suite, "/v1/completions", body)
    assert events[-1] == ("", "[DONE]")
    chunks = []
    for _, data in events[:-1]:
        # The client has one type for both forms; only in chunks is there no reason yet.
        read = json.loads(data)
        assert all(choice["finish_reason"] in (None, "stop", "length") for choice in read["choices"])
        chunks.append(read)
        for choice in read["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        COMPLETION.validate_json(json.dumps(read), strict=True)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] > 0
    for choice in answer.choices:
        parts = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice.index]
        assert bool("".join(one["text"] for one in parts)) == bool(choice.text)


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(suite: Suite, name: str) -> None:
    answer = RESPONSE.validate_json(whole(suite, "/v1/responses", RESPONSES[name]), strict=True)
    events = streamed(suite, "/v1/responses", RESPONSES[name])
    read = [RESPONSE_EVENT.validate_json(data, strict=True) for _, data in events]
    assert [event for event, _ in events] == [event.type for event in read]
    assert [event.sequence_number for event in read] == list(range(len(read)))
    assert [event.type for event in read[:2]] == ["response.created", "response.in_progress"]
    assert read[-1].type == f"response.{answer.status}"
    order = " ".join(event.type.removeprefix("response.") for event in read[2:-1])
    text = (
        r"output_item\.added content_part\.added (output_text\.delta )+output_text\.done content_part\.done "
        r"output_item\.done"
    )
    call = r"output_item\.added (function_call_arguments\.delta )*function_call_arguments\.done output_item\.done"
    assert re.fullmatch(rf"(({text}|{call})( |$))+", order), order
    assert [item.type for item in read[-1].response.output] == [item.type for item in answer.output]


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(suite: Suite, name: str) -> None:
    answer = MESSAGE.validate_json(whole(suite, "/v1/messages", MESSAGES[name]), strict=True)
    events = streamed(suite, "/v1/messages", MESSAGES[name])
    assert [event for event, _ in events] == [json.loads(data)["type"] for _, data in events]
    read = [MESSAGE_EVENT.validate_json(data, strict=True) for event, data in events if event != "ping"]
    order = " ".join(event.type for event in read)
    block = "content_block_start (content_block_delta )*content_block_stop "
    assert re.fullmatch(rf"message_start ({block})+message_delta message_stop", order), order
    starts = [event for event in read if event.type == "content_block_start"]
    assert [event.index for event in starts] == list(range(len(answer.content)))
    assert [event.content_block.type for event in starts] == [block.type for block in answer.content]
    (last,) = [event for event in read if event.type == "message_delta"]
    assert last.delta.stop_reason == answer.stop_reason
    assert last.usage.output_tokens == answer.usage.output_tokens


def test_the_other_answers(suite: Suite) -> None:
    vectors: TypeAdapter[Any] = TypeAdapter(openai.types.CreateEmbeddingResponse)
    vectors.validate_json(whole(suite, "/v1/embeddings", {**MODEL, "input": ["a", "b"]}), strict=True)
    counted: TypeAdapter[Any] = TypeAdapter(anthropic.types.MessageTokensCount)
    counted.validate_json(
        whole(suite, "/v1/messages/count_tokens", {**MODEL, "messages": [{"role": "user", "content": "x"}]}),
        strict=True,
    )
    model: TypeAdapter[Any] = TypeAdapter(openai.types.Model)
    model.validate_json(httpx.get(f"{suite.url}/v1/models/tekken").content, strict=True)
    listed = httpx.get(f"{suite.url}/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    own: TypeAdapter[Any] = TypeAdapter(anthropic.types.ModelInfo)
    for each in listed["data"]:
        own.validate_json(json.dumps(each), strict=True)
