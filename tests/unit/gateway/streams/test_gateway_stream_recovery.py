"""Workers and postprocess replicas come, go and refuse in any order: no token is lost or doubled, nothing leaks."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.common.errors import ErrorKind, SluiceError, invalid, unavailable
from services.gateway.clients.postprocess_link import PostLink
from services.gateway.core.request import (
    Finish,
    FinishReason,
)
from services.gateway.core.stream_view import Sent
from services.gateway.streams.postprocess_pool import MAX_REPLAYS, REPLACED
from services.gateway.streams.stream import GenerationStream
from tests.support.fakes.streams import EOS, LOST, MAX_TOKENS, Sink, StreamTable
from tests.support.fakes.streams import FakePost as Post


class AnyTrouble(RuleBasedStateMachine):
    """Random interleavings of everything that can happen to streams and to those who work on them."""

    @initialize(posts=st.integers(1, 3))
    def begin(self, posts: int) -> None:
        self.desk = StreamTable(posts)
        self.streams: list[tuple[GenerationStream, Sink]] = []
        self.cancelled: set[int] = set()
        self.next_token = 100

    def live(self, data: st.DataObject) -> GenerationStream | None:
        running = [stream for stream, _ in self.streams if stream.slot in self.desk.stream_manager._streams]
        return data.draw(st.sampled_from(running)) if running else None

    @rule(worker=st.integers(0, 1))
    def connect(self, worker: int) -> None:
        self.streams.append(self.desk.connect(worker))

    @rule(data=st.data(), many=st.integers(1, 4))
    def tokens(self, data: st.DataObject, many: int) -> None:
        rows = []
        for stream, _ in self.streams:
            if stream.worker is not None and stream.end is None and data.draw(st.booleans()):
                rows.append((stream, list(range(self.next_token, self.next_token + many))))
                self.next_token += many
        self.desk.tokens(rows)

    @rule(data=st.data(), cached=st.integers(0, 1))
    def started(self, data: st.DataObject, cached: int) -> None:
        if (stream := self.live(data)) is not None and stream.worker is not None:
            self.desk.events.on_started(stream, cached)

    @rule(data=st.data())
    def engine_ends(self, data: st.DataObject) -> None:
        stream = self.live(data)
        if stream is not None and stream.worker is not None and stream.end is None:
            cast(Any, stream.worker).slots.discard(stream.slot)
            self.desk.events.on_ended(stream, FinishReason.LENGTH, None, len(stream.tokens) - stream.resumed)

    @rule(data=st.data(), retryable=st.booleans())
    def engine_fails(self, data: st.DataObject, retryable: bool) -> None:
        stream = self.live(data)
        if stream is not None and stream.worker is not None and stream.end is None:
            cast(Any, stream.worker).slots.discard(stream.slot)
            self.desk.events.on_failed(stream, LOST if retryable else invalid("x"))

    @rule(data=st.data())
    def engine_aborts(self, data: st.DataObject) -> None:
        stream = self.live(data)
        if stream is not None and stream.worker is not None and stream.end is None:
            cast(Any, stream.worker).slots.discard(stream.slot)
            self.desk.events.on_ended(stream, FinishReason.CANCELLED, None, 0)

    @rule(index=st.integers(0, 1))
    def worker_lost(self, index: int) -> None:
        self.desk.lose_worker(index)

    @rule(data=st.data(), index=st.integers(0, 1))
    def migration_ends(self, data: st.DataObject, index: int) -> None:
        stream_manager = self.desk.stream_manager
        self.desk.moving = [stream for stream in self.desk.moving if stream.slot in stream_manager._streams]
        if not self.desk.moving:
            return
        stream = data.draw(st.sampled_from(self.desk.moving))
        if data.draw(st.booleans()):
            self.desk.resume(stream, index)
        else:
            self.desk.moving.remove(stream)
            stream_manager.give_up(stream, unavailable("no worker"))

    @rule(data=st.data(), comes_back=st.booleans())
    def post_lost(self, data: st.DataObject, comes_back: bool) -> None:
        self.desk.lose_post(data.draw(st.integers(0, len(self.desk.posts) - 1)), comes_back)

    @rule(data=st.data())
    def post_connects(self, data: st.DataObject) -> None:
        self.desk.connect_post(data.draw(st.integers(0, len(self.desk.posts) - 1)))

    @rule(data=st.data())
    def post_leaves(self, data: st.DataObject) -> None:
        post = data.draw(st.sampled_from(self.desk.posts))
        if post.connected:
            post.leaving = True
            self.desk.events.on_post_leaves(cast(PostLink, post))

    @rule(data=st.data(), how=st.sampled_from(["draining", "overloaded", "never"]))
    def post_refuses(self, data: st.DataObject, how: str) -> None:
        stream = self.live(data)
        if stream is not None and stream.post is not None:
            cast(Any, stream.post).close_stream(stream.slot)
            error = invalid("never") if how == "never" else unavailable("no", code=how)
            self.desk.events.on_text_failed(stream, error)

    @rule(data=st.data())
    def text(self, data: st.DataObject) -> None:
        if (stream := self.live(data)) is not None:
            self.desk.events.on_text(stream, "x")

    @rule(data=st.data())
    def finished(self, data: st.DataObject) -> None:
        stream = self.live(data)
        if stream is not None and stream.post is not None:
            cast(Any, stream.post).close_stream(stream.slot)
            self.desk.events.on_finished(stream, Finish(FinishReason.STOP, completion_tokens=len(stream.tokens)))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if (stream := self.live(data)) is not None:
            self.cancelled.add(stream.slot)
            self.desk.stream_manager.cancel(stream)

    @rule()
    def sweep_waiting(self) -> None:
        self.desk.stream_manager.texts.sweep()

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "desk"):
            return
        self.desk.check()
        live = self.desk.stream_manager._streams
        for stream, sink in self.streams:
            over = stream.slot not in live
            assert len(sink.ends) == (1 if over and stream.slot not in self.cancelled else 0)
            assert stream.text_sent == len("".join(sink.pieces))
        running = {slot for worker in self.desk.workers for slot in worker.slots}
        assert running <= live.keys(), "an engine computes without a client"


AnyTrouble.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyTrouble = AnyTrouble.TestCase


def test_a_lost_replica_is_replaced_and_only_the_rest_is_asked_for() -> None:
    desk = StreamTable(posts=2)
    stream, sink = desk.connect()
    desk.tokens([(stream, [10, 11, 12])])
    desk.events.on_text(stream, "abc")
    first = cast(Any, stream.post)
    other = next(post for post in desk.posts if post is not first)
    desk.lose_post(desk.posts.index(first))
    # The same name: ids of tool calls are made of it.
    assert other.opened == [("r-0", [10, 11, 12], (3, Sent()))]
    assert stream.degraded == (REPLACED,)
    desk.tokens([(stream, [13])])
    assert other.held[stream.slot] == [10, 11, 12, 13]
    desk.events.on_finished(stream, Finish(FinishReason.STOP, completion_tokens=4))
    assert cast(Finish, sink.ends[0]).degraded == (REPLACED,)


def test_drained_replica_hands_streams_over_without_degradation() -> None:
    desk = StreamTable(posts=2)
    streams = [desk.connect()[0] for _ in range(6)]
    desk.tokens([(stream, [7]) for stream in streams])
    desk.posts[0].leaving = True
    desk.events.on_post_leaves(cast(PostLink, desk.posts[0]))
    assert desk.posts[0].live == 0
    assert all(cast(Any, stream.post) is desk.posts[1] for stream in streams)
    assert not any(stream.degraded for stream in streams)
    desk.check()


def test_the_only_replica_may_drain_until_another_one_is_there() -> None:
    desk = StreamTable(posts=2)
    desk.posts[1].connected = False
    stream, _ = desk.connect()
    desk.posts[0].leaving = True
    desk.events.on_post_leaves(cast(PostLink, desk.posts[0]))
    assert cast(Any, stream.post) is desk.posts[0]
    desk.tokens([(stream, [7])])
    desk.connect_post(1)
    assert cast(Any, stream.post) is desk.posts[1]
    desk.check()


def test_a_stream_that_kills_its_replicas_is_given_up() -> None:
    desk = StreamTable(posts=2)
    stream, sink = desk.connect()
    for _ in range(MAX_REPLAYS):
        desk.lose_post(desk.posts.index(cast(Any, stream.post)), comes_back=True)
        assert not sink.ends
    desk.lose_post(desk.posts.index(cast(Any, stream.post)), comes_back=True)
    assert isinstance(sink.ends[0], SluiceError)
    assert desk.stream_manager.live == 0


def test_streams_without_replicas_fail_after_the_wait() -> None:
    desk = StreamTable(posts=1)
    stream, sink = desk.connect()
    desk.lose_post(0)
    desk.tokens([(stream, [9, 9])])
    assert not sink.ends
    desk.stream_manager.texts.sweep()
    error = cast(SluiceError, sink.ends[0])
    assert (error.kind, error.code) == (ErrorKind.UNAVAILABLE, "service_unavailable")
    desk.check()


def test_an_engine_that_was_done_needs_no_worker_any_more() -> None:
    desk = StreamTable()
    stream, sink = desk.connect()
    desk.events.on_ended(stream, FinishReason.LENGTH, None, 5)
    desk.lose_worker(0)
    assert not desk.moving
    assert not sink.ends
    desk.check()


def test_tokens_that_are_complete_need_no_worker_any_more() -> None:
    desk = StreamTable()
    for tokens, reason in (([5] * MAX_TOKENS, FinishReason.LENGTH), ([5, 6, EOS], FinishReason.STOP)):
        stream, _ = desk.connect()
        desk.tokens([(stream, tokens)])
        desk.lose_worker(0)
        assert not desk.moving
        assert cast(Post, stream.post).ends[stream.slot] is reason
    early, _ = desk.connect()
    desk.tokens([(early, [EOS])])  # min_tokens is 2: this one does not count
    desk.lose_worker(0)
    assert desk.moving == [early]


def test_usage_and_bookings_after_a_move() -> None:
    desk = StreamTable()
    stream, sink = desk.connect(0)
    desk.events.on_started(stream, 1)
    desk.tokens([(stream, [5, 6, 7])])
    desk.lose_worker(0)
    desk.resume(stream, 1)
    desk.events.on_started(stream, 0)
    desk.tokens([(stream, [8, 9])])
    desk.events.on_ended(stream, FinishReason.LENGTH, None, 2)
    assert stream.completion_tokens == 5
    desk.events.on_finished(stream, Finish(FinishReason.LENGTH, completion_tokens=5))
    assert desk.freed == [("res-1", 1, 3), ("res-2", 0, 2)]
    assert desk.computed == ["res-1", "res-2"]
    assert (stream.prompt_tokens, stream.cached_tokens) == (4, 1)
    assert cast(Finish, sink.ends[0]).migrations == 1
