"""The token path: nothing is lost, doubled or leaked, whichever way streams end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, cast

import pytest

from services.common.errors import ErrorKind, SluiceError, unavailable
from services.common.rpc.breaker import Breaker
from services.gateway.clients.postprocess_link import PostLink
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.core.request import (
    Finish,
    FinishReason,
    GenerationRequest,
    Route,
    SamplingParams,
    StopParams,
    TextPrompt,
    TokenizedPrompt,
)
from services.gateway.metrics import GatewayMetrics
from services.gateway.placement.selector import Placement
from services.gateway.streams.interfaces import StreamEnd, StreamObserver
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.stream import GenerationStream
from tests.support.fakes.fake_links import FakeLink

REQUEST = GenerationRequest("r", "m", TextPrompt("x"), 1, SamplingParams(seed=5), StopParams())
PROMPT = TokenizedPrompt(b"\1\0\0\0" * 4, b"", "", b"", b"", 100, b"")


class FakeWorker(FakeLink):
    worker_id = "w"
    peer = "worker w"
    connected = True

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker()
        self.started: list[int] = []
        self.seeds: list[int | None] = []
        self.cancelled: list[int] = []

    def start(self, stream: GenerationStream, *rest: Any) -> None:
        self.started.append(stream.slot)
        self.seeds.append(stream.seed)

    def cancel(self, slot: int) -> None:
        self.cancelled.append(slot)


class FakePost(FakeLink):
    connected = True
    retired = False
    leaving = False

    def __init__(self) -> None:
        super().__init__()
        self.fed: list[tuple[bytes, bytes, bytes]] = []
        self.ended: list[int] = []
        self.closed: list[int] = []

    def open(self, stream: GenerationStream) -> None:
        pass

    def feed(self, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        self.fed.append((slots, counts, token_ids))

    def end(self, slot: int, reason: FinishReason, stop_token_id: int | None) -> None:
        self.ended.append(slot)

    def close_stream(self, slot: int) -> None:
        self.closed.append(slot)


class FakeSink:
    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.ends: list[Finish | SluiceError] = []

    def text(self, piece: str) -> None:
        assert not self.ends
        self.pieces.append(piece)

    def reasoning(self, piece: str) -> None:
        assert not self.ends
        self.pieces.append(f"({piece})")

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        assert not self.ends
        self.pieces.append(f"{call}:{name}:{arguments}")

    def finish(self, finish: Finish) -> None:
        self.ends.append(finish)

    def fail(self, error: SluiceError) -> None:
        self.ends.append(error)


class Desk:
    """A switchboard with fakes around it."""

    def __init__(self, posts: int = 1, max_streams: int = 1000, observers: Sequence[StreamObserver] = ()) -> None:
        self.freed: list[str] = []
        self.computed: list[str] = []
        self.outcomes: list[tuple[int | None, int]] = []
        self.stream_manager = StreamManager(
            max_streams, self.computed.append, self.free, GatewayMetrics(), observers=observers
        )
        self.worker = FakeWorker()
        self.posts = [FakePost() for _ in range(posts)]
        self.stream_manager.texts.links.update({str(i): cast(PostLink, post) for i, post in enumerate(self.posts)})

    def free(self, reservation_id: str, cached_tokens: int | None, output_tokens: int) -> None:
        self.freed.append(reservation_id)
        self.outcomes.append((cached_tokens, output_tokens))

    def tokens(self, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        self.stream_manager.on_tokens(cast(WorkerLink, self.worker), slots, counts, token_ids)

    def connect(self, post: int = 0, index: int = 0) -> tuple[GenerationStream, FakeSink]:
        sink = FakeSink()
        route = Route("w", reservation_id=f"res-{len(self.worker.started)}")
        others = [one for number, one in enumerate(self.posts) if number != post]
        for other in others:
            other.retired = True  # the stream shall go to the one named
        stream = self.stream_manager.connect(
            REQUEST, index, PROMPT, Placement(route, cast(WorkerLink, self.worker)), 10, cast(Any, sink)
        )
        for other in others:
            other.retired = False
        return stream, sink


def packed(*values: int) -> bytes:
    return array("I", values).tobytes()


def test_tokens_with_one_replica_pass_untouched() -> None:
    desk = Desk()
    (first, _), (second, _) = desk.connect(), desk.connect()
    columns = packed(first.slot, second.slot), packed(1, 1), packed(1, 2)
    desk.tokens(*columns)
    assert desk.posts[0].fed == [columns]


def test_tokens_are_split_between_replicas_and_unknown_slots_dropped() -> None:
    desk = Desk(posts=2)
    first, _ = desk.connect(post=0)
    second, _ = desk.connect(post=1)
    third, _ = desk.connect(post=0)
    desk.tokens(packed(first.slot, 999, second.slot, third.slot), packed(1, 2, 2, 1), packed(10, 90, 91, 20, 21, 30))
    assert desk.posts[0].fed == [(packed(first.slot, third.slot), packed(1, 1), packed(10, 30))]
    assert desk.posts[1].fed == [(packed(second.slot), packed(2), packed(20, 21))]


def test_choices_have_their_own_seed() -> None:
    desk = Desk()
    desk.connect(index=0)
    desk.connect(index=1)
    assert desk.worker.seeds == [5, 6]


def test_a_stop_string_stops_the_engine() -> None:
    desk = Desk()
    stream, sink = desk.connect()
    desk.stream_manager.on_started(stream, 3)
    desk.stream_manager.on_text(stream, "a")
    finish = Finish(FinishReason.STOP, stop_string="END", completion_tokens=4)
    desk.stream_manager.on_finished(stream, finish)
    assert desk.worker.cancelled == [stream.slot]
    assert sink.ends == [finish]
    assert (stream.cached_tokens, stream.completion_tokens) == (3, 4)
    assert desk.computed == desk.freed == ["res-0"]
    assert desk.outcomes == [(3, 4)]


def test_the_router_hears_how_a_request_ended_however_it_did() -> None:
    desk = Desk()
    never_started, _ = desk.connect()
    desk.stream_manager.cancel(never_started)
    broken_off, _ = desk.connect()
    desk.stream_manager.on_started(broken_off, 0)
    desk.stream_manager.on_failed(broken_off, unavailable("x"))
    finished, _ = desk.connect()
    desk.stream_manager.on_started(finished, 2)
    desk.stream_manager.on_ended(finished, FinishReason.LENGTH, None, 9)
    desk.stream_manager.on_finished(finished, Finish(FinishReason.LENGTH, completion_tokens=8))
    assert desk.freed == ["res-0", "res-1", "res-2"]
    assert desk.outcomes == [(None, 0), (0, 0), (2, 8)]


def test_an_engine_that_is_done_is_not_cancelled() -> None:
    desk = Desk()
    stream, sink = desk.connect()
    desk.stream_manager.on_ended(stream, FinishReason.LENGTH, None, 9)
    assert desk.posts[0].ended == [stream.slot]
    assert not sink.ends
    desk.stream_manager.on_finished(stream, Finish(FinishReason.LENGTH, completion_tokens=9))
    assert len(sink.ends) == 1
    assert desk.worker.cancelled == []


def test_a_silent_stream_is_given_up_at_the_second_sweep() -> None:
    desk = Desk()
    silent, silent_sink = desk.connect()
    talking, talking_sink = desk.connect()
    desk.stream_manager.sweep_stalled()
    desk.stream_manager.on_text(talking, "x")
    desk.stream_manager.sweep_stalled()
    assert [type(end) for end in silent_sink.ends] == [SluiceError]
    assert desk.worker.cancelled == [silent.slot]
    assert not talking_sink.ends


def test_tokens_that_a_parser_holds_back_for_long_are_no_silence_of_the_worker() -> None:
    desk = Desk()
    stream, sink = desk.connect()
    for token in range(4):
        desk.stream_manager.sweep_stalled()
        desk.tokens(packed(stream.slot), packed(1), packed(token))
    assert not sink.ends
    desk.stream_manager.sweep_stalled()
    desk.stream_manager.sweep_stalled()
    assert [type(end) for end in sink.ends] == [SluiceError]


def test_the_bound_on_streams() -> None:
    desk = Desk(max_streams=2)
    desk.connect()
    desk.stream_manager.admit(1)
    with pytest.raises(SluiceError) as caught:
        desk.stream_manager.admit(2)
    assert caught.value.kind is ErrorKind.OVERLOADED


def test_what_parsers_find_goes_to_the_sink_in_order() -> None:
    desk = Desk()
    stream, sink = desk.connect()
    desk.stream_manager.on_reasoning(stream, "hm")
    assert stream.first_text_at
    desk.stream_manager.on_text(stream, "a")
    desk.stream_manager.on_tool_call(stream, 0, "id", "f", "{")
    desk.stream_manager.on_tool_call(stream, 0, "", "", "}")
    for reason in ("one", "two", "one"):
        desk.stream_manager.on_degraded(stream, reason)
    desk.stream_manager.on_finished(stream, Finish(FinishReason.TOOL_CALLS, completion_tokens=9, reasoning_tokens=4))
    assert sink.pieces == ["(hm)", "a", "0:f:{", "0::}"]
    assert sink.ends == [
        Finish(FinishReason.TOOL_CALLS, completion_tokens=9, reasoning_tokens=4, degraded=("one", "two"))
    ]
    assert stream.reasoning_tokens == 4
    desk.stream_manager.on_reasoning(stream, "late")
    desk.stream_manager.on_tool_call(stream, 1, "id", "g", "")
    desk.stream_manager.on_degraded(stream, "late")
    assert len(sink.pieces) == 4


class BrokenObserver:
    def on_started(self, stream: GenerationStream) -> None: ...

    def on_assigned(self, stream: GenerationStream, worker_id: str) -> None: ...

    def on_ended(self, stream: GenerationStream, end: StreamEnd) -> None:
        raise RuntimeError(end.outcome)


def test_stream_end_with_a_failing_observer_reaches_the_client() -> None:
    desk = Desk(observers=[BrokenObserver()])
    error = unavailable("gone")
    (failed, failed_sink), (finished, finished_sink) = desk.connect(), desk.connect()
    desk.stream_manager.give_up(failed, error)
    desk.stream_manager.on_finished(finished, Finish(FinishReason.STOP))
    assert (failed_sink.ends, finished_sink.ends) == ([error], [Finish(FinishReason.STOP)])
    assert desk.stream_manager.live == 0


class RecordingObserver:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def on_started(self, stream: GenerationStream) -> None:
        self.calls.append(("started", stream.request_id))

    def on_assigned(self, stream: GenerationStream, worker_id: str) -> None:
        self.calls.append(("assigned", worker_id))

    def on_ended(self, stream: GenerationStream, end: StreamEnd) -> None:
        self.calls.append(("ended", end.outcome))


def test_stream_observer_is_notified_once_of_each_step_and_never_of_tokens() -> None:
    observer = RecordingObserver()
    desk = Desk(observers=[observer])
    stream, _ = desk.connect()
    for token in range(3):
        desk.tokens(packed(stream.slot), packed(1), packed(token))
        desk.stream_manager.on_text(stream, "a")
    desk.stream_manager.on_finished(stream, Finish(FinishReason.STOP))
    desk.stream_manager.cancel(stream)
    assert observer.calls == [("started", "r-0"), ("assigned", "w"), ("ended", "finished")]
