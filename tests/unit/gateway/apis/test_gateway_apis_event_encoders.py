"""Streams of both APIs: however a turn is cut into pieces and writes, the events come to the same turn."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.gateway.apis.anthropic.dialect import ERROR_FORMAT, error_event_body
from services.gateway.apis.anthropic.event_encoder import MessageEventEncoder
from services.gateway.apis.anthropic.message import full_message
from services.gateway.apis.openai.validation import check
from services.gateway.apis.responses.event_encoder import ResponseEventEncoder
from services.gateway.apis.responses.resource import OutputOptions, Resource, output_of
from services.gateway.apis.responses.schemas import ResponsesRequest
from services.gateway.core.request import Finish, FinishReason, SamplingParams
from services.gateway.http.entrance import Entrance
from services.gateway.http.error_formats import ErrorFormats
from services.gateway.http.sse import EventStream
from services.gateway.operations.sinks import CollectedTurn, EventEncoder, StreamedBlocks, StreamedTurn
from tests.support.data.bodies import BUDGETS
from tests.support.oracles.open_responses import event_problems

TextDelta = tuple[str, str]
Cuts = list[tuple[int, bool]]
SAID = st.lists(
    st.tuples(st.sampled_from(["text", "reasoning", "call"]), st.text('ab{\u00e4😀"\n', max_size=12)), max_size=5
)
CUTS = st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=8)
ENDS = st.sampled_from([Finish(FinishReason.STOP), Finish(FinishReason.LENGTH), Finish(FinishReason.TOOL_CALLS)])
BROKEN = SluiceError(ErrorKind.UNAVAILABLE, "All workers are gone.")


def same(error: SluiceError) -> SluiceError:
    return error


def streamed(encoder: EventEncoder) -> StreamedBlocks:
    response = StreamedBlocks(encoder, same)
    response.stream = cast(EventStream, SimpleNamespace(notify=lambda first=False: None))
    return response


def say(turn: StreamedTurn | CollectedTurn, message: list[TextDelta], cuts: Cuts, write: Callable[[], None]) -> None:
    """Says everything in pieces; `write` is called after some of them."""
    at = 0
    for call, (kind, text) in enumerate(message):
        left, first = text, True
        while left or first:
            size, writes = cuts[at % len(cuts)]
            at += 1
            piece, left = left[:size], left[size:]
            if kind == "call":
                named = ("call_" + str(call), "f") if first else ("", "")
                turn.tool_call(call, *named, piece)
            elif piece:
                getattr(turn, kind)(piece)
            first = False
            if writes:
                write()


def heard(
    response: StreamedBlocks, message: list[TextDelta], cuts: Cuts, end: Finish | SluiceError
) -> list[dict[str, Any]]:
    """The events of a turn without those of its silences, of which one follows each write but the last."""
    written: list[bytes] = []
    silences: list[bytes] = []

    def write() -> None:
        if response.unsent or written:
            written.append(response.take())
            silences.append(response.silence())
            written.append(silences[-1])

    turn = response.sinks[0]
    say(turn, message, cuts, write)
    turn.finish(end) if isinstance(end, Finish) else turn.fail(end)
    written.append(response.take())
    events = parsed(b"".join(written))
    if "sequence_number" in events[0]:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    alive = parsed(b"".join(silences))
    assert len(alive) == len(silences)
    assert all(event["type"] in ("ping", "response.in_progress") for event in alive)
    assert all(event.get("response") == events[1].get("response") for event in alive)
    left = [event for chunk in written if chunk not in silences for event in parsed(chunk)]
    return [{**event, "sequence_number": at} if "sequence_number" in event else event for at, event in enumerate(left)]


def parsed(chunk: bytes) -> list[dict[str, Any]]:
    events = []
    for event in chunk.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        events.append(orjson.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + events[-1]["type"].encode()
    return events


def collected(message: list[TextDelta], cuts: Cuts, end: Finish) -> CollectedTurn:
    turn = CollectedTurn(same)
    say(turn, message, cuts, lambda: None)
    turn.finish(end)
    return turn


def responding(shown: OutputOptions) -> tuple[StreamedBlocks, Resource, list[dict[str, Any]]]:
    fields = check(ResponsesRequest, {"model": "m", "input": "hi"}, BUDGETS)
    resource = Resource("resp_1", fields, SamplingParams(), None)
    ended: list[dict[str, Any]] = []
    return streamed(ResponseEventEncoder(lambda: resource, shown, ended.append)), resource, ended


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name != "id"} for item in output]


@given(SAID, CUTS, ENDS, st.booleans(), st.booleans())
def test_a_streamed_response_is_the_whole_one(
    message: list[TextDelta], cuts: Cuts, end: Finish, summary: bool, sealed: bool
) -> None:
    shown = OutputOptions(summary, sealed)
    turn, resource, ended = responding(shown)
    events = heard(turn, message, cuts, end)
    other = collected(message, cuts[::-1], end)
    expected = resource.completed(output_of(other.transcript.blocks, shown, "resp_1"), end, other.usage.counts())
    final = events[-1]["response"]
    assert without_ids(final["output"]) == without_ids(expected["output"])
    assert {**final, "output": [], "completed_at": 0} == {**expected, "output": [], "completed_at": 0}
    assert ended == [final]
    assert event_problems(events) == []

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    for index, item in enumerate(final["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[-1]["type"] == "response.output_item.done"
        deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        (told,) = [event.get("text", event.get("arguments")) for event in own if _is_whole(event)]
        assert deltas == told
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}


def _is_whole(event: dict[str, Any]) -> bool:
    kind: str = event["type"]
    return kind.endswith((".output_text.done", "arguments.done", "reasoning_text.done", "summary_text.done"))


def understood(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A message put together from its events, as Anthropic's client does."""
    message = events[0]["message"]
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append({**event["content_block"], "open": True, "json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            assert block["open"]
            kind = delta["type"]
            if kind == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[kind]
                block[name] += delta["text" if name == "text" else "thinking" if name == "thinking" else "partial_json"]
        elif event["type"] == "content_block_stop":
            block = message["content"][event["index"]]
            del block["open"]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    return dict(message)


@example(
    [("text", "a"), ("reasoning", "b"), ("text", "a")], [(1, True)], Finish(FinishReason.STOP), False, False, False
)
@given(SAID, CUTS, ENDS, st.booleans(), st.booleans(), st.booleans())
def test_a_streamed_message_is_the_whole_one(
    message: list[TextDelta], cuts: Cuts, end: Finish, thinking: bool, omitted: bool, clipped: bool
) -> None:
    shown = {"clipped": clipped, "thinking": thinking, "omitted": omitted}
    encoder = MessageEventEncoder("msg_1", "m", lambda error: error_event_body(error, "req_1"), **shown)
    events = heard(streamed(encoder), message, cuts, end)
    other = collected(message, cuts[::-1], end)
    expected = full_message("msg_1", "m", other.transcript.blocks, end, other.usage.counts(), **shown)
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert sum(event["type"] == "ping" for event in events) == bool(expected["content"])
    whole = understood(events)
    assert whole["stop_reason"] == expected["stop_reason"]
    assert len(whole["content"]) == len(expected["content"])
    for block, wanted in zip(whole["content"], expected["content"], strict=True):
        arguments = block.pop("json")
        if wanted["type"] == "tool_use":
            block["input"] = _parsed(arguments)
        wanted.pop("citations", None)
        assert block == wanted


def _parsed(arguments: str) -> Any:
    try:
        parsed = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"unparsed_arguments": arguments}


def test_stream_that_fails_ends_with_an_error_event() -> None:
    turn, _, ended = responding(OutputOptions())
    events = heard(turn, [("text", "abc")], [(1, True)], BROKEN)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"
    assert ended == [events[-1]["response"]]

    shown = {"clipped": False, "thinking": True, "omitted": False}
    encoder = MessageEventEncoder("msg_1", "m", lambda error: error_event_body(error, "req_1"), **shown)
    events = heard(streamed(encoder), [("text", "abc")], [(1, True)], BROKEN)
    assert events[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "All workers are gone."},
        "request_id": "req_1",
    }


def test_failure_before_the_first_event_is_an_http_error() -> None:
    turn, _, _ = responding(OutputOptions())
    turn.sinks[0].fail(BROKEN)
    assert turn.failure is BROKEN
    waiting = CollectedTurn(same)
    waiting.fail(BROKEN)
    with pytest.raises(SluiceError, match="All workers are gone"):
        waiting.result()


async def answer_of(path: str, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> tuple[Any, Any, Any]:
    """What a client hears, and what the application inside saw."""
    seen: dict[str, Any] = {}
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)
        start = {"type": "http.response.start", "status": status, "headers": [(b"content-length", b"9"), (b"x", b"y")]}
        await send(start)
        await send({"type": "http.response.body", "body": body[:3], "more_body": True})
        await send({"type": "http.response.body", "body": body[3:]})

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await Entrance(ErrorFormats(app, [ERROR_FORMAT]))({"type": "http", "path": path, "headers": headers}, receive, send)
    return sent[0], b"".join(message.get("body", b"") for message in sent[1:]), seen


OPENAI = b'{"error":{"message":"No.","type":"x","param":null,"code":null}}'


@pytest.mark.parametrize("body", [OPENAI, b'{"type":"error","error":{"type":"y","message":"No."}}', b"No."])
async def test_errors_on_anthropics_paths_have_its_form(body: bytes) -> None:
    start, message, _ = await answer_of("/v1/messages", 429, body, [])
    headers = dict(start["headers"])
    request_id = headers[b"request-id"].decode()
    assert orjson.loads(message) == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "No."},
        "request_id": request_id,
    }
    assert int(headers[b"content-length"]) == len(message)
    assert headers[b"x"] == b"y"


async def test_other_paths_and_good_answers_stay_as_they_are() -> None:
    start, message, _ = await answer_of("/v1/chat/completions", 429, OPENAI, [(b"anthropic-version", b"2023-06-01")])
    assert message == OPENAI
    assert b"request-id" not in dict(start["headers"])
    start, message, _ = await answer_of("/v1/messages", 200, OPENAI, [])
    assert message == OPENAI
    assert b"request-id" in dict(start["headers"])


async def test_headers_reach_admission_unchanged() -> None:
    headers = [(b"x-api-key", b"k"), (b"x-api-key", b"other"), (b"anthropic-version", b"2023-06-01")]
    _, _, seen = await answer_of("/v1/messages", 200, b"{}", headers)
    assert seen["headers"] == headers


def test_a_message_begins_with_no_output_however_far_the_engine_is() -> None:
    encoder = MessageEventEncoder("msg_1", "m", lambda error: {}, clipped=False, thinking=True, omitted=False)
    response = streamed(encoder)
    turn = response.sinks[0]
    # The engine has run on past a stop string before the first of the text goes out.
    counted = SimpleNamespace(prompt_tokens=7, cached_tokens=3, completion_tokens=5, reasoning_tokens=2)
    response.usage.generations.append(cast(Any, counted))
    turn.text("one")
    turn.text(" two")
    counted.completion_tokens, counted.reasoning_tokens = 3, 0
    turn.finish(Finish(FinishReason.STOP, stop_string=" three"))
    events = [orjson.loads(event.split(b"data: ")[1]) for event in response.take().split(b"\n\n")[:-1]]
    begun, ended = events[0]["message"]["usage"], events[-2]["usage"]
    assert (begun["input_tokens"], begun["cache_read_input_tokens"]) == (4, 3)
    assert (begun["output_tokens"], begun["output_tokens_details"]["thinking_tokens"]) == (0, 0)
    assert (ended["output_tokens"], ended["output_tokens_details"]["thinking_tokens"]) == (3, 0)
