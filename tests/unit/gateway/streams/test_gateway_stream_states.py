"""The states of a stream: events in any order, late and doubled, and after each of them every part agrees."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.common.base.errors import SluiceError, invalid, unavailable
from services.common.base.packing import pack_u32
from services.gateway.backends.rpc.postprocess_link import PostLink
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.core.request import NULL_SINK, DisaggregationPart, Finish, FinishReason, Role, TextPrompt
from services.gateway.streams.interfaces import StreamEnd
from services.gateway.streams.running_memory import RunningMemory
from services.gateway.streams.states import IllegalTransitionError, StreamState, TextState, checked
from services.gateway.streams.stream import GenerationStream
from tests.support.fakes.streams import EOS, LOST, PROMPT, REQUEST, Sink, StreamTable

RAW = TextPrompt("x")
ON_WORKER = {StreamState.RUNNING, StreamState.PREFILLING, StreamState.DECODING}
KINDS: dict[str, dict[str, Any]] = {
    "text of a replica": {},
    "text of the engine": {"request": {"engine_text": True}},
    "prompt of the worker": {"prompt": {"raw": RAW}},
}


class CountingObserver:
    """Counts the calls for each stream."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_started(self, stream: GenerationStream) -> None:
        self.calls.append(("started", stream.slot))

    def on_assigned(self, stream: GenerationStream, worker_id: str) -> None: ...

    def on_ended(self, stream: GenerationStream, end: StreamEnd) -> None:
        self.calls.append(("ended", stream.slot))


class PairTable(StreamTable):
    """Passes handoffs on, and lets the decode worker of a failed pair run alone if `alone` is set."""

    alone = False

    def on_handoff(self, stream: GenerationStream, handoff: bytes) -> None:
        assert stream.attempt is not None
        assert stream.attempt.decode is not None
        part = DisaggregationPart(Role.DECODE, handoff)
        self.stream_manager.start_on_worker(stream, stream.attempt.decode._replace(part=part))

    def on_interrupted(self, stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> SluiceError | None:
        decode = None if stream.attempt is None else stream.attempt.decode
        if decode is None or stream.state is StreamState.RUNNING or not self.alone:
            return super().on_interrupted(stream, worker, error)
        self.stream_manager.start_on_worker(stream, decode)
        return None


class AnyOrder(RuleBasedStateMachine):
    """Sends events to streams whether they fit their state or not, as no link would."""

    @initialize(posts=st.integers(1, 3))
    def begin(self, posts: int) -> None:
        self.observer = CountingObserver()
        self.table = PairTable(posts, observers=[self.observer])
        self.manager, self.events = self.table.stream_manager, self.table.events
        self.memory = RunningMemory()
        self.streams: list[tuple[GenerationStream, Sink]] = []
        self.cancelled: set[int] = set()
        self.next_token = 100

    def any_stream(self, data: st.DataObject) -> GenerationStream | None:
        """Returns any stream, ended or not."""
        return data.draw(st.sampled_from(self.streams))[0] if self.streams else None

    def stopped(self, data: st.DataObject) -> GenerationStream | None:
        """Returns any stream, after its engine has stopped."""
        stream = self.any_stream(data)
        if stream is not None and stream.worker is not None:
            cast(Any, stream.worker).slots.discard(stream.slot)
        return stream

    @rule(worker=st.integers(0, 1), kind=st.sampled_from(sorted(KINDS)), connected=st.booleans())
    def connect(self, worker: int, kind: str, connected: bool) -> None:
        self.table.workers[worker].connected = connected
        self.start(kind, worker)
        self.table.workers[worker].connected = True

    @rule(worker=st.integers(0, 1))
    def connect_pair(self, worker: int) -> None:
        self.start("text of a replica", worker, prefill=1 - worker)

    def start(self, kind: str, worker: int, prefill: int | None = None) -> None:
        changes = KINDS[kind]
        memory = self.memory.take("tenant", 1)
        self.streams.append(
            self.table.connect(
                worker,
                prefill=prefill,
                memory=memory,
                request=replace(REQUEST, **changes.get("request", {})),
                prompt=replace(PROMPT, **changes.get("prompt", {})),
            )
        )
        memory.release()

    @rule(data=st.data(), count=st.integers(1, 4), last=st.booleans())
    def tokens(self, data: st.DataObject, count: int, last: bool) -> None:
        rows = []
        for stream, _ in self.streams:
            if data.draw(st.booleans()):
                ids = list(range(self.next_token, self.next_token + count))
                rows.append((stream, [*ids, EOS] if last else ids))
                self.next_token += count
        self.table.tokens(rows)

    @rule(data=st.data())
    def prompt(self, data: st.DataObject) -> None:
        if (stream := self.any_stream(data)) is not None:
            self.events.on_prompt(stream, pack_u32([1, 2, 3]))

    @rule(data=st.data(), cached=st.sampled_from([None, 0, 1]))
    def prefill_done(self, data: st.DataObject, cached: int | None) -> None:
        if (stream := self.any_stream(data)) is not None:
            self.events.on_started(stream, cached)

    @rule(data=st.data())
    def handoff(self, data: st.DataObject) -> None:
        if (stream := self.stopped(data)) is not None:
            self.events.on_handoff(stream, b"handoff")

    @rule(data=st.data(), reason=st.sampled_from([FinishReason.LENGTH, FinishReason.CANCELLED]))
    def engine_ends(self, data: st.DataObject, reason: FinishReason) -> None:
        if (stream := self.stopped(data)) is not None:
            self.events.on_ended(stream, reason, None, len(stream.tokens), 1)

    @rule(data=st.data(), retryable=st.booleans(), alone=st.booleans())
    def engine_fails(self, data: st.DataObject, retryable: bool, alone: bool) -> None:
        self.table.alone = alone
        if (stream := self.stopped(data)) is not None:
            self.events.on_failed(stream, LOST if retryable else invalid("x"))

    @rule(index=st.integers(0, 1), alone=st.booleans())
    def worker_is_lost(self, index: int, alone: bool) -> None:
        self.table.alone = alone
        self.table.lose_worker(index)

    @rule(data=st.data(), index=st.integers(0, 1), finds=st.booleans())
    def migration_ends(self, data: st.DataObject, index: int, finds: bool) -> None:
        self.table.moving = [stream for stream in self.table.moving if stream.state is StreamState.MOVING]
        if self.table.moving:
            stream = data.draw(st.sampled_from(self.table.moving))
            if finds:
                self.table.resume(stream, index)
            else:
                self.manager.give_up(stream, unavailable("no worker"))

    @rule(data=st.data())
    def text(self, data: st.DataObject) -> None:
        if (stream := self.any_stream(data)) is not None:
            self.events.on_text(stream, "x")

    @rule(data=st.data())
    def postprocess_ends(self, data: st.DataObject) -> None:
        if (stream := self.any_stream(data)) is not None:
            for post in self.table.posts:
                post.close_stream(stream.slot)
            self.events.on_finished(stream, Finish(FinishReason.STOP, completion_tokens=len(stream.tokens)))

    @rule(data=st.data(), comes_back=st.booleans())
    def replica_is_lost(self, data: st.DataObject, comes_back: bool) -> None:
        self.table.lose_post(data.draw(st.integers(0, len(self.table.posts) - 1)), comes_back)

    @rule(data=st.data())
    def replica_connects(self, data: st.DataObject) -> None:
        self.table.connect_post(data.draw(st.integers(0, len(self.table.posts) - 1)))

    @rule(data=st.data())
    def replica_drains(self, data: st.DataObject) -> None:
        post = data.draw(st.sampled_from(self.table.posts))
        if post.connected:
            post.leaving = True
            self.events.on_post_leaves(cast(PostLink, post))

    @rule(data=st.data(), how=st.sampled_from(["draining", "overloaded", "never"]))
    def replica_refuses(self, data: st.DataObject, how: str) -> None:
        stream = self.any_stream(data)
        if stream is not None and (stream.post is not None or stream.state is StreamState.ENDED):
            if stream.post is not None:
                cast(Any, stream.post).close_stream(stream.slot)
            self.events.on_text_failed(stream, invalid("never") if how == "never" else unavailable("no", code=how))

    @rule()
    def wait_for_replicas_ends(self) -> None:
        self.manager.texts.sweep()

    @rule(data=st.data(), how=st.sampled_from([SluiceError, RuntimeError]))
    def handling_raises(self, data: st.DataObject, how: type[Exception]) -> None:
        if (stream := self.any_stream(data)) is not None:
            self.events.on_broken(stream, invalid("x") if how is SluiceError else RuntimeError("x"))

    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        if (stream := self.any_stream(data)) is not None:
            if stream.state is not StreamState.ENDED:
                self.cancelled.add(stream.slot)
            self.manager.cancel(stream)

    @rule(data=st.data())
    def deadline_passes(self, data: st.DataObject) -> None:
        if (stream := self.any_stream(data)) is not None:
            self.manager.give_up(stream, unavailable("late"))

    @invariant()
    def states_agree_with_what_streams_hold(self) -> None:
        if not hasattr(self, "table"):
            return
        for stream, sink in self.streams:
            ended = stream.state is StreamState.ENDED
            assert ended == (stream.slot not in self.manager._streams)
            assert (stream.worker is not None) == (stream.state in ON_WORKER)
            assert (stream.post is not None) == (stream.text_state is TextState.OPEN)
            assert ended == (stream.text_state is TextState.CLOSED) == (stream.sink is NULL_SINK)
            assert (stream.end is not None) <= (stream.state in (StreamState.ENGINE_DONE, StreamState.ENDED))
            assert stream.text_sent == len("".join(sink.pieces)) or ended  # a late text is counted and dropped
            assert len(sink.ends) == (ended and stream.slot not in self.cancelled)
            assert self.observer.calls.count(("ended", stream.slot)) == ended
            if stream.state in (StreamState.MOVING, StreamState.ENDED) and stream.attempt is not None:
                assert not stream.attempt.reserved
        for worker in self.table.workers:
            carried = {stream.slot for stream, _ in self.streams if cast(Any, stream.worker) is worker}
            assert worker.streams.keys() == worker.keep.keys() == carried
            assert worker.slots <= carried, "an engine computes without a client"

    @invariant()
    def everything_is_released_once(self) -> None:
        if not hasattr(self, "table"):
            return
        freed = [reservation for reservation, _, _ in self.table.freed]
        assert len(freed) == len(set(freed))
        assert len(freed) + len(self.table.booked) == self.table.reservations
        assert len(set(self.table.computed)) == len(self.table.computed)
        assert self.memory.used == self.manager.live
        self.table.check()


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase


ALLOWED = {
    "STARTING": "RUNNING PREFILLING ENDED",
    "RUNNING": "MOVING ENGINE_DONE ENDED",
    "PREFILLING": "DECODING RUNNING MOVING ENGINE_DONE ENDED",
    "DECODING": "RUNNING MOVING ENGINE_DONE ENDED",
    "MOVING": "RUNNING PREFILLING ENDED",
    "ENGINE_DONE": "ENDED",
    "ENDED": "",
}


@pytest.mark.parametrize(("before", "after"), list(product(StreamState, StreamState)), ids=lambda state: state.name)
def test_transition_that_is_not_drawn_raises(before: StreamState, after: StreamState) -> None:
    if after.name in ALLOWED[before.name].split():
        assert checked(before, after) is after
    else:
        with pytest.raises(IllegalTransitionError, match=f"from {before.name} to {after.name}"):
            checked(before, after)


def test_resuming_a_stream_that_has_ended_raises() -> None:
    table = StreamTable()
    stream, sink = table.connect()
    table.lose_worker(0)
    table.stream_manager.cancel(stream)
    with pytest.raises(IllegalTransitionError):
        table.resume(stream, 1)
    assert not sink.ends
    assert not table.workers[1].streams
