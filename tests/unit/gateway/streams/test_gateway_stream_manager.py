"""The token path: nothing is lost, doubled or leaked, whichever way streams end."""

from __future__ import annotations

from array import array
from typing import cast

from services.common.base.errors import SluiceError, unavailable
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.core.request import (
    Finish,
    FinishReason,
)
from services.gateway.streams.interfaces import StreamEnd
from services.gateway.streams.stream import GenerationStream
from tests.support.fakes.streams import StreamTable


def packed(*values: int) -> bytes:
    return array("I", values).tobytes()


def test_tokens_with_one_replica_pass_untouched() -> None:
    desk = StreamTable(posts=1, workers=1)
    (first, _), (second, _) = desk.connect(), desk.connect()
    desk.tokens([(first, [11]), (second, [12])])
    assert desk.posts[0].fed == [(packed(first.slot, second.slot), packed(1, 1), packed(11, 12))]


def test_tokens_are_split_between_replicas_and_unknown_slots_dropped() -> None:
    desk = StreamTable()
    first, _ = desk.connect(post=0)
    second, _ = desk.connect(post=1)
    third, _ = desk.connect(post=0)
    columns = packed(first.slot, 999, second.slot, third.slot), packed(1, 2, 2, 1), packed(10, 90, 91, 20, 21, 30)
    desk.events.on_tokens(cast(WorkerLink, desk.workers[0]), *columns)
    assert desk.posts[0].fed == [(packed(first.slot, third.slot), packed(1, 1), packed(10, 30))]
    assert desk.posts[1].fed == [(packed(second.slot), packed(2), packed(20, 21))]


def test_a_stop_string_stops_the_engine() -> None:
    desk = StreamTable(posts=1)
    stream, sink = desk.connect()
    desk.events.on_started(stream, 3)
    desk.events.on_text(stream, "a")
    finish = Finish(FinishReason.STOP, stop_string="END", completion_tokens=4)
    desk.events.on_finished(stream, finish)
    assert desk.workers[0].cancelled == [stream.slot]
    assert sink.ends == [finish]
    assert (stream.cached_tokens, stream.completion_tokens) == (3, 4)
    assert (desk.computed, desk.freed) == (["res-1"], [("res-1", 3, 4)])


def test_reservation_is_freed_with_the_usage_for_every_end() -> None:
    desk = StreamTable(posts=1)
    never_started, _ = desk.connect()
    desk.stream_manager.cancel(never_started)
    broken_off, _ = desk.connect()
    desk.events.on_started(broken_off, 0)
    desk.events.on_failed(broken_off, unavailable("x"))
    finished, _ = desk.connect()
    desk.events.on_started(finished, 2)
    desk.events.on_ended(finished, FinishReason.LENGTH, None, 9)
    desk.events.on_finished(finished, Finish(FinishReason.LENGTH, completion_tokens=8))
    assert desk.freed == [("res-1", None, 0), ("res-2", 0, 0), ("res-3", 2, 8)]


def test_cached_tokens_that_an_engine_counts_at_the_end_are_unknown_until_then() -> None:
    desk = StreamTable(posts=1)
    manager = desk.stream_manager
    for end in ("usage", "usage without them", "cancelled", "failed", "stop string"):
        stream, _ = desk.connect()
        manager.events.on_started(stream, None)
        desk.tokens([(stream, [7, 8])])
        if end.startswith("usage"):
            manager.events.on_ended(stream, FinishReason.STOP, 8, 2, 3 if end == "usage" else None)
            manager.events.on_finished(stream, Finish(FinishReason.STOP, completion_tokens=2))
            assert stream.cached_tokens == (3 if end == "usage" else 0)
        elif end == "cancelled":
            manager.cancel(stream)
        elif end == "failed":
            manager.events.on_failed(stream, unavailable("x"))
        else:
            manager.events.on_finished(stream, Finish(FinishReason.STOP, stop_string="END", completion_tokens=2))
    assert desk.computed == [f"res-{number}" for number in range(1, 6)]
    assert [cached for _, cached, _ in desk.freed] == [3, None, None, None, None]


def test_an_engine_that_is_done_is_not_cancelled() -> None:
    desk = StreamTable(posts=1)
    stream, sink = desk.connect()
    desk.events.on_ended(stream, FinishReason.LENGTH, None, 9)
    assert list(desk.posts[0].ends) == [stream.slot]
    assert not sink.ends
    desk.events.on_finished(stream, Finish(FinishReason.LENGTH, completion_tokens=9))
    assert len(sink.ends) == 1
    assert desk.workers[0].cancelled == []


def test_stalled_stream_fails_at_the_second_sweep() -> None:
    desk = StreamTable(posts=1)
    silent, silent_sink = desk.connect()
    talking, talking_sink = desk.connect()
    desk.stream_manager.sweep_stalled()
    desk.events.on_text(talking, "x")
    desk.stream_manager.sweep_stalled()
    assert [type(end) for end in silent_sink.ends] == [SluiceError]
    assert desk.workers[0].cancelled == [silent.slot]
    assert not talking_sink.ends


def test_tokens_held_back_by_a_parser_do_not_count_as_stalled() -> None:
    desk = StreamTable(posts=1)
    stream, sink = desk.connect()
    for token in range(4):
        desk.stream_manager.sweep_stalled()
        desk.tokens([(stream, [token])])
    assert not sink.ends
    desk.stream_manager.sweep_stalled()
    desk.stream_manager.sweep_stalled()
    assert [type(end) for end in sink.ends] == [SluiceError]


def test_what_parsers_find_goes_to_the_sink_in_order() -> None:
    desk = StreamTable(posts=1)
    stream, sink = desk.connect()
    desk.events.on_reasoning(stream, "hm")
    assert stream.first_text_at
    desk.events.on_text(stream, "a")
    desk.events.on_tool_call(stream, 0, "id", "f", "{")
    desk.events.on_tool_call(stream, 0, "", "", "}")
    for reason in ("one", "two", "one"):
        desk.events.on_degraded(stream, reason)
    desk.events.on_finished(stream, Finish(FinishReason.TOOL_CALLS, completion_tokens=9, reasoning_tokens=4))
    assert sink.pieces == ["(hm)", "a", "0:f:{", "0::}"]
    assert sink.ends == [
        Finish(FinishReason.TOOL_CALLS, completion_tokens=9, reasoning_tokens=4, degraded=("one", "two"))
    ]
    assert stream.reasoning_tokens == 4
    desk.events.on_reasoning(stream, "late")
    desk.events.on_tool_call(stream, 1, "id", "g", "")
    desk.events.on_degraded(stream, "late")
    assert len(sink.pieces) == 4


class BrokenObserver:
    def on_started(self, stream: GenerationStream) -> None: ...

    def on_assigned(self, stream: GenerationStream, worker_id: str) -> None: ...

    def on_ended(self, stream: GenerationStream, end: StreamEnd) -> None:
        raise RuntimeError(end.outcome)


def test_stream_end_with_a_failing_observer_reaches_the_client() -> None:
    desk = StreamTable(observers=[BrokenObserver()])
    error = unavailable("gone")
    (failed, failed_sink), (finished, finished_sink) = desk.connect(), desk.connect()
    desk.stream_manager.give_up(failed, error)
    desk.events.on_finished(finished, Finish(FinishReason.STOP))
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
    desk = StreamTable(observers=[observer])
    stream, _ = desk.connect()
    for token in range(3):
        desk.tokens([(stream, [token])])
        desk.events.on_text(stream, "a")
    desk.events.on_finished(stream, Finish(FinishReason.STOP))
    desk.stream_manager.cancel(stream)
    assert observer.calls == [("started", "r-0"), ("assigned", "w0"), ("ended", "finished")]
