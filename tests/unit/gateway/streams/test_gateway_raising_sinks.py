"""A sink that raises ends its own stream; the session that carries it and its other streams go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import grpc
import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u32
from services.common.rpc.replicas import Replica
from services.gateway.backends.rpc.postprocess_link import PostLink
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.core.request import Finish
from sluice.v1 import common_pb2, postprocess_pb2, worker_pb2
from tests.support.fakes.streams import REQUEST, Sink, StreamTable

EVENTS: dict[str, dict[str, Any]] = {
    "text": {"text": "piece"},
    "reasoning": {"reasoning": "piece"},
    "tool_call": {"tool_calls": [postprocess_pb2.ToolCallDelta(id="c", name="f")]},
    "tokens": {
        "tokens": postprocess_pb2.TokenTexts(lengths=pack_u32([1]), pieces=b"x", text_offsets=pack_u32([0])),
    },
    "finish": {"finish_reason": common_pb2.FINISH_REASON_STOP},
}
POSITION = common_pb2.PositionLogprobs()


class RaisingSink(Sink):
    """Raises in one of its methods, as a sink without the details that a worker sends does."""

    def __init__(self, method: str) -> None:
        super().__init__()
        setattr(self, method, self._raise)

    def _raise(self, *_values: object) -> None:
        raise AttributeError("no such detail")


class DetailSink(Sink):
    """Records details as well."""

    def __init__(self) -> None:
        super().__init__()
        self.details = 0

    def logprobs(self, positions: object) -> None:
        self.details += 1

    def prompt_logprobs(self, positions: object) -> None:
        self.details += 1

    def tokens(self, pieces: object, offsets: object) -> None:
        self.details += 1


class FakeReplica:
    """A replica that no call reaches."""

    address = peer = "post"
    channel = stub = None


def check_ends(raising: Sink, other: Sink, table: StreamTable) -> None:
    (error,) = [end for end in raising.ends if isinstance(end, SluiceError)]
    assert (error.kind, error.retryable) == (ErrorKind.INTERNAL, False)
    assert not [end for end in other.ends if isinstance(end, SluiceError)]
    assert table.stream_manager.live == len(table.booked) == (0 if other.ends else 1)


@pytest.mark.parametrize("detail", ["logprobs", "prompt_logprobs"])
async def test_detail_of_a_worker_that_a_sink_cannot_take_ends_only_its_stream(detail: str) -> None:
    table = StreamTable()
    manager, channel = table.stream_manager, grpc.aio.insecure_channel("127.0.0.1:1")
    link = WorkerLink("w0", "", channel, 1.0, manager.events)
    link._connected.set()
    request, other_sink = replace(REQUEST, logprobs=0, prompt_logprobs=0), DetailSink()
    first, raising = table.connect(link, request=request, sink=RaisingSink(detail))
    other, _ = table.connect(link, request=request, sink=other_sink)
    details: dict[str, Any] = {detail: [POSITION]}
    extras = [worker_pb2.TokenExtra(slot=stream.slot, **details) for stream in (first, other)]
    link._on_message(worker_pb2.TokenBatch(extras=extras))
    assert other_sink.details == 1
    check_ends(raising, other_sink, table)
    assert link.breaker.passable


@pytest.mark.parametrize("method", EVENTS)
async def test_event_of_postprocess_that_a_sink_cannot_take_ends_only_its_stream(method: str) -> None:
    table = StreamTable()
    link = PostLink(cast(Replica[Any], FakeReplica()), 1.0, table.events)
    link._connected.set()
    other_sink = DetailSink()
    (first, raising), (other, _) = table.connect(sink=RaisingSink(method)), table.connect(sink=other_sink)
    for stream in (first, other):
        link.streams[stream.slot] = stream
    events = [postprocess_pb2.StreamEvent(slot=stream.slot, **EVENTS[method]) for stream in (first, other)]
    link._on_message(postprocess_pb2.TextBatch(events=events))
    assert other_sink.details or other_sink.pieces or any(isinstance(end, Finish) for end in other_sink.ends)
    if method == "finish":  # the stream had ended: the client sees no second end
        assert table.stream_manager.live == 0
    else:
        check_ends(raising, other_sink, table)


async def test_text_column_that_a_sink_cannot_take_ends_only_its_stream() -> None:
    table = StreamTable()
    link = PostLink(cast(Replica[Any], FakeReplica()), 1.0, table.events)
    (first, raising), (other, other_sink) = table.connect(sink=RaisingSink("text")), table.connect()
    for stream in (first, other):
        link.streams[stream.slot] = stream
    slots, lengths = pack_u32([first.slot, other.slot]), pack_u32([2, 3])
    link._on_message(postprocess_pb2.TextBatch(slots=slots, text_lengths=lengths, text="abcde"))
    assert other_sink.pieces == ["cde"]
    check_ends(raising, other_sink, table)
