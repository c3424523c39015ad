"""The openai engine: bodies that it sends, and chunks that it reads."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.postprocess.detokenize.stream import StreamOptions
from services.postprocess.parsers.events import CallArguments, CallStart, Content, Reasoning
from services.worker.contract.capabilities import Capability
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    MediaKind,
    SamplingParams,
    StopParams,
    StructuredOutput,
    Usage,
)
from services.worker.engines.openai import OpenAiEngine
from services.worker.engines.openai.body import CHAT, COMPLETIONS, ChunkReader, path_and_body
from services.worker.generation.validation import validate
from services.worker.settings import WorkerSettings
from tests.support.fakes.engines import CONFIG, media_item, request
from tests.support.oracles.errors import raises_error

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**more: Any) -> bytes:
    return json.dumps({"messages": MESSAGES, **more}).encode()


def read(*chunks: dict[str, Any]) -> list[Delta]:
    stream = DeltaStream()
    reader = ChunkReader(stream)
    deltas: list[Delta] = []
    for chunk in chunks:
        reader.take(chunk)
        deltas += stream.take()
    reader.close()
    return deltas + list(stream.take())


def choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


@pytest.mark.parametrize("kind", MediaKind)
def test_openai_engine_refuses_media(kind: MediaKind) -> None:
    config = replace(CONFIG, capabilities=OpenAiEngine.CAPABILITIES | {Capability.TOKEN_IDS})
    with raises_error(kind=ErrorKind.FAILED_PRECONDITION, param="media", code="unsupported_by_engine"):
        validate(request(media=(media_item(kind),)), config)


def test_body_of_a_chat_has_the_requested_options_only() -> None:
    request = GenerateRequest(
        "a",
        "chat",
        messages_json=chat(tools=[{"type": "function"}], add_generation_prompt=True),
        sampling=SamplingParams(temperature=0.0, seed=7, engine_options={"min_p": 0.1, "stream": False}),
        stop=StopParams(max_tokens=9),
        text_out=StreamOptions("chat", stop=("x",), single_tool_call=True),
    )
    path, body = path_and_body(request, "served")
    assert path == CHAT
    assert body == {
        "model": "served",
        "messages": MESSAGES,
        "tools": [{"type": "function"}],
        "parallel_tool_calls": False,
        "temperature": 0.0,
        "seed": 7,
        "min_p": 0.1,
        "max_tokens": 9,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_body_of_a_text_prompt_is_a_completion() -> None:
    path, body = path_and_body(GenerateRequest("a", "chat", text="Once"), "served")
    assert (path, body["prompt"]) == (COMPLETIONS, "Once")
    assert "messages" not in body


@pytest.mark.parametrize(("tool_choice", "sent"), [(None, True), ("auto", True), ("required", False)])
def test_constraint_is_sent_unless_the_tool_choice_is_it(tool_choice: str | None, sent: bool) -> None:
    guided = StructuredOutput("json_schema", '{"type":"object"}')
    request = GenerateRequest("a", "chat", messages_json=chat(tool_choice=tool_choice), guided=guided)
    assert ("response_format" in path_and_body(request, "served")[1]) is sent


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (GenerateRequest("a", "chat"), "prompt"),
        (GenerateRequest("a", "chat", messages_json=chat(continue_final_message=True)), "continue_final_message"),
        (GenerateRequest("a", "chat", messages_json=chat(chat_template="{{ x }}")), "chat_template"),
        (
            GenerateRequest(
                "a", "chat", text="x", text_out=StreamOptions("chat", stop=("x",), include_stop_string=True)
            ),
            "stop",
        ),
    ],
)
def test_request_that_the_api_cannot_express_is_rejected(request_: GenerateRequest, param: str) -> None:
    with pytest.raises(SluiceError) as caught:
        path_and_body(request_, "served")
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, param)


def test_chunks_become_events_in_order_with_the_usage_of_the_server() -> None:
    deltas = read(
        choice({"role": "assistant", "content": ""}),
        choice({"reasoning": "so"}),
        choice({"content": "Hi"}),
        choice({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a"'}}]}),
        choice({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}),
        choice({}, "tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}},
    )
    events = [event for delta in deltas if delta.text for event in delta.text.events]
    assert events == [
        Reasoning("so"),
        Content("Hi"),
        CallStart(0, "c", "f"),
        CallArguments(0, '{"a"'),
        CallArguments(0, ":1}"),
    ]
    assert (deltas[-1].finish_reason, deltas[-1].usage) == (FinishReason.STOP, Usage(5, 4, None))
    assert deltas[0].cached_tokens == 0


def test_stream_without_usage_counts_its_chunks() -> None:
    assert read(choice({"content": "a"}), choice({"content": "b"}, "length"))[-1].usage == Usage(0, 2, None)


@pytest.mark.parametrize(
    ("chunks", "kind", "part"),
    [
        ([choice({"content": "a"})], ErrorKind.STREAM_INCOMPLETE, "without a finish reason"),
        ([{"error": {"message": "too hot", "code": 400}}], ErrorKind.INVALID_ARGUMENT, "too hot"),
        ([{"error": "broken"}], ErrorKind.INTERNAL, "failed on this request"),
        ([choice({}, "content_filter")], ErrorKind.INVALID_ARGUMENT, "filtered"),
        ([choice({}, "error")], ErrorKind.INTERNAL, "failed on this request"),
        ([{"choices": [7]}], ErrorKind.INTERNAL, "malformed"),
        ([choice({"tool_calls": [{"index": -1}]})], ErrorKind.INTERNAL, "malformed"),
        ([choice({"tool_calls": [{"index": 10**9}]})], ErrorKind.INTERNAL, "malformed"),
    ],
)
def test_broken_stream_is_a_typed_error(chunks: list[dict[str, Any]], kind: ErrorKind, part: str) -> None:
    with pytest.raises(SluiceError, match=part) as caught:
        read(*chunks)
    assert caught.value.kind is kind


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--engine-args", "url=nowhere"], "expected http://host:port"),
        (["--engine-args", "url=http://h:1,start_s=0"], "positive number of seconds"),
        (["--engine-args", "url=http://h:1,kv_events=off"], "kv_events"),
        (["--engine-args", "url=http://h:1", "--role", "prefill"], "remove --role"),
    ],
)
def test_wrong_options_are_rejected(flags: list[str], part: str) -> None:
    with pytest.raises(SluiceError, match=part):
        OpenAiEngine.from_args(WorkerSettings.load(["--engine", "openai", *flags]))
