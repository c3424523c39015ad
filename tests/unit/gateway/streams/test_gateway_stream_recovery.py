"""Streams whose postprocess replica or worker is lost or drains."""

from __future__ import annotations

from typing import Any, cast

from services.common.base.errors import ErrorKind, SluiceError
from services.gateway.backends.rpc.postprocess_link import PostLink
from services.gateway.core.request import (
    Finish,
    FinishReason,
)
from services.gateway.core.stream_view import Sent
from services.gateway.streams.postprocess_pool import MAX_REPLAYS, REPLACED
from tests.support.fakes.streams import EOS, MAX_TOKENS, StreamTable
from tests.support.fakes.streams import FakePost as Post


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
