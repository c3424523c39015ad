"""Workers and postprocess replicas come, go and refuse in any order: no token is lost or doubled, nothing leaks."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.common.errors import ErrorKind, SluiceError, invalid, unavailable
from services.common.packing import unpack_u32
from services.common.rpc.breaker import Breaker
from services.gateway.clients.postprocess_link import PostLink, Sent
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
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.postprocess_pool import MAX_REPLAYS, REPLACED
from services.gateway.streams.stream import GenerationStream
from tests.support.fakes.fake_links import FakeLink

EOS = 2
MAX_TOKENS = 40
REQUEST = GenerationRequest("r", "m", TextPrompt("x"), 1, SamplingParams(seed=5), StopParams(min_tokens=2))
PROMPT = TokenizedPrompt(b"\1\0\0\0", b"", "", b"", array("I", [EOS]).tobytes(), 100, b"")
LOST = SluiceError(ErrorKind.DISCONNECTED, "gone")


class Worker(FakeLink):
    """Runs what it is given; knows which slots it runs."""

    def __init__(self, name: str) -> None:
        self.worker_id = name
        self.peer = f"worker {name}"
        super().__init__()
        self.connected = True
        self.breaker = Breaker()
        self.slots: set[int] = set()

    def start(self, slot: int, *rest: Any) -> None:
        assert slot not in self.slots
        self.slots.add(slot)

    def cancel(self, slot: int) -> None:
        self.slots.discard(slot)


class Post(FakeLink):
    """Keeps what a replica would: the tokens of each stream it was told to open."""

    def __init__(self) -> None:
        super().__init__()
        self.connected = True
        self.retired = False
        self.leaving = False
        self.held: dict[int, list[int]] = {}
        self.opened: list[tuple[Any, ...]] = []
        self.ends: dict[int, FinishReason] = {}

    def open(
        self, slot: int, name: str, request: Any, prompt: Any, trace: Any, max_tokens: int, tokens: Any, sent: Any
    ) -> None:
        assert self.connected
        assert slot not in self.held
        assert (tokens is None) == (sent is None)
        self.held[slot] = list(tokens or ())
        self.opened.append((name, list(tokens or ()), None if sent is None else replace(sent)))

    def feed(self, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        ids, start = unpack_u32(token_ids), 0
        for slot, number in zip(unpack_u32(slots), unpack_u32(counts), strict=True):
            if slot in self.held and self.connected:
                self.held[slot] += ids[start : start + number]
            start += number

    def end(self, slot: int, reason: FinishReason, stop_token_id: int | None) -> None:
        assert slot in self.held
        self.ends[slot] = reason

    def close_stream(self, slot: int) -> None:
        self.held.pop(slot, None)
        self.ends.pop(slot, None)

    def clear(self) -> None:
        self.held.clear()
        self.ends.clear()

    abandon = clear


class Sink:
    def __init__(self) -> None:
        self.said = ""
        self.ends: list[Finish | SluiceError] = []

    def text(self, piece: str) -> None:
        assert not self.ends
        self.said += piece

    def finish(self, finish: Finish) -> None:
        self.ends.append(finish)

    def fail(self, error: SluiceError) -> None:
        self.ends.append(error)


class WorkerTable:
    """A switchboard between fakes, with a migration that the test completes by hand."""

    def __init__(self, posts: int = 2, workers: int = 2) -> None:
        self.booked: set[str] = set()
        self.reservations = 0
        self.computed: list[str] = []
        self.stream_manager = StreamManager(1000, self.computed.append, self.free, GatewayMetrics(), post_wait_s=0)
        self.stream_manager.migrate = self.migrate
        self.workers = [Worker(f"w{number}") for number in range(workers)]
        self.posts = [Post() for _ in range(posts)]
        self.stream_manager.texts.links.update(
            {str(number): cast(PostLink, post) for number, post in enumerate(self.posts)}
        )
        self.moving: list[GenerationStream] = []
        self.may_move = True

    def free(self, reservation_id: str, cached_tokens: int | None, output_tokens: int) -> None:
        assert output_tokens >= 0
        self.booked.remove(reservation_id)

    def book(self) -> str:
        self.reservations += 1
        self.booked.add(f"res-{self.reservations}")
        return f"res-{self.reservations}"

    def migrate(self, stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> bool:
        if not (self.may_move and error.retryable):
            return False
        stream.migrations += 1
        self.moving.append(stream)
        return True

    def connect(self, worker: int = 0) -> tuple[GenerationStream, Sink]:
        sink = Sink()
        link = self.workers[worker]
        route = Route(link.worker_id, reservation_id=self.book())
        stream = self.stream_manager.connect(
            REQUEST, 0, PROMPT, route, cast(WorkerLink, link), MAX_TOKENS, cast(Any, sink)
        )
        return stream, sink

    def resume(self, stream: GenerationStream, worker: int) -> None:
        self.moving.remove(stream)
        link = self.workers[worker]
        self.stream_manager.resume(stream, Route(link.worker_id, reservation_id=self.book()), cast(WorkerLink, link))

    def tokens(self, rows: list[tuple[GenerationStream, list[int]]]) -> None:
        for worker in self.workers:
            own = [(stream, ids) for stream, ids in rows if cast(Any, stream.worker) is worker]
            self.stream_manager.on_tokens(
                cast(WorkerLink, worker),
                array("I", [stream.slot for stream, _ in own]).tobytes(),
                array("I", [len(ids) for _, ids in own]).tobytes(),
                array("I", [token for _, ids in own for token in ids]).tobytes(),
            )

    def lose_worker(self, index: int) -> None:
        self.workers[index].slots.clear()
        self.stream_manager.on_worker_lost(cast(WorkerLink, self.workers[index]), LOST)

    def lose_post(self, index: int, comes_back: bool = False) -> None:
        post = self.posts[index]
        post.connected = post.leaving = False
        post.clear()
        self.stream_manager.on_post_lost(cast(PostLink, post), LOST)
        if comes_back:
            self.connect_post(index)

    def connect_post(self, index: int) -> None:
        post = self.posts[index]
        if not post.connected:
            post.connected = True
            self.stream_manager.on_post_connected(cast(PostLink, post))

    def check(self) -> None:
        live = self.stream_manager._streams
        for link in self.workers:
            assert link.live == sum(cast(Any, one.worker) is link and one.end is None for one in live.values())
        for post in self.posts:
            assert post.live == sum(cast(Any, stream.post) is post for stream in live.values())
            assert post.held.keys() <= live.keys()
        for stream in live.values():
            if stream.post is None:
                assert stream.slot in self.stream_manager.texts._waiting
                continue
            held = cast(Post, stream.post)
            assert held.held[stream.slot] == list(stream.tokens), "a gap or a repeat"
            assert (stream.slot in held.ends) == (stream.end is not None)
        assert self.stream_manager.texts.waiting <= len(live)
        assert self.booked == {stream.reservation_id for stream in live.values()} - {""}


class AnyTrouble(RuleBasedStateMachine):
    """Random interleavings of everything that can happen to streams and to those who work on them."""

    @initialize(posts=st.integers(1, 3))
    def begin(self, posts: int) -> None:
        self.desk = WorkerTable(posts)
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
            self.desk.stream_manager.on_started(stream, cached)

    @rule(data=st.data())
    def engine_ends(self, data: st.DataObject) -> None:
        stream = self.live(data)
        if stream is not None and stream.worker is not None and stream.end is None:
            cast(Any, stream.worker).slots.discard(stream.slot)
            self.desk.stream_manager.on_ended(stream, FinishReason.LENGTH, None, len(stream.tokens) - stream.resumed)

    @rule(data=st.data(), retryable=st.booleans())
    def engine_fails(self, data: st.DataObject, retryable: bool) -> None:
        stream = self.live(data)
        if stream is not None and stream.worker is not None and stream.end is None:
            cast(Any, stream.worker).slots.discard(stream.slot)
            self.desk.stream_manager.on_failed(stream, LOST if retryable else invalid("x"))

    @rule(data=st.data())
    def engine_aborts(self, data: st.DataObject) -> None:
        stream = self.live(data)
        if stream is not None and stream.worker is not None and stream.end is None:
            cast(Any, stream.worker).slots.discard(stream.slot)
            self.desk.stream_manager.on_ended(stream, FinishReason.CANCELLED, None, 0)

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
            stream_manager.give_up(stream, unavailable("nobody"))

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
            self.desk.stream_manager.on_post_leaves(cast(PostLink, post))

    @rule(data=st.data(), how=st.sampled_from(["draining", "overloaded", "never"]))
    def post_refuses(self, data: st.DataObject, how: str) -> None:
        stream = self.live(data)
        if stream is not None and stream.post is not None:
            cast(Any, stream.post).close_stream(stream.slot)
            error = invalid("never") if how == "never" else unavailable("no", code=how)
            self.desk.stream_manager.on_text_failed(stream, error)

    @rule(data=st.data())
    def text(self, data: st.DataObject) -> None:
        if (stream := self.live(data)) is not None:
            self.desk.stream_manager.on_text(stream, "x")

    @rule(data=st.data())
    def finished(self, data: st.DataObject) -> None:
        stream = self.live(data)
        if stream is not None and stream.post is not None:
            cast(Any, stream.post).close_stream(stream.slot)
            self.desk.stream_manager.on_finished(
                stream, Finish(FinishReason.STOP, completion_tokens=len(stream.tokens))
            )

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
            assert stream.text_sent == len(sink.said)
        running = {slot for worker in self.desk.workers for slot in worker.slots}
        assert running <= live.keys(), "an engine computes for nobody"


AnyTrouble.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyTrouble = AnyTrouble.TestCase


def test_a_lost_replica_is_replaced_and_only_the_rest_is_asked_for() -> None:
    desk = WorkerTable(posts=2)
    stream, sink = desk.connect()
    desk.tokens([(stream, [10, 11, 12])])
    desk.stream_manager.on_text(stream, "abc")
    first = cast(Any, stream.post)
    other = next(post for post in desk.posts if post is not first)
    desk.lose_post(desk.posts.index(first))
    # The same name: ids of tool calls are made of it.
    assert other.opened == [("r-0", [10, 11, 12], Sent(text=3))]
    assert stream.degraded == (REPLACED,)
    desk.tokens([(stream, [13])])
    assert other.held[stream.slot] == [10, 11, 12, 13]
    desk.stream_manager.on_finished(stream, Finish(FinishReason.STOP, completion_tokens=4))
    assert cast(Finish, sink.ends[0]).degraded == (REPLACED,)


def test_a_drained_replica_hands_over_without_a_mark() -> None:
    desk = WorkerTable(posts=2)
    streams = [desk.connect()[0] for _ in range(6)]
    desk.tokens([(stream, [7]) for stream in streams])
    desk.posts[0].leaving = True
    desk.stream_manager.on_post_leaves(cast(PostLink, desk.posts[0]))
    assert desk.posts[0].live == 0
    assert all(cast(Any, stream.post) is desk.posts[1] for stream in streams)
    assert not any(stream.degraded for stream in streams)
    desk.check()


def test_the_only_replica_may_drain_until_another_one_is_there() -> None:
    desk = WorkerTable(posts=2)
    desk.posts[1].connected = False
    stream, _ = desk.connect()
    desk.posts[0].leaving = True
    desk.stream_manager.on_post_leaves(cast(PostLink, desk.posts[0]))
    assert cast(Any, stream.post) is desk.posts[0]
    desk.tokens([(stream, [7])])
    desk.connect_post(1)
    assert cast(Any, stream.post) is desk.posts[1]
    desk.check()


def test_a_stream_that_kills_its_replicas_is_given_up() -> None:
    desk = WorkerTable(posts=2)
    stream, sink = desk.connect()
    for _ in range(MAX_REPLAYS):
        desk.lose_post(desk.posts.index(cast(Any, stream.post)), comes_back=True)
        assert not sink.ends
    desk.lose_post(desk.posts.index(cast(Any, stream.post)), comes_back=True)
    assert isinstance(sink.ends[0], SluiceError)
    assert desk.stream_manager.live == 0


def test_without_replicas_streams_wait_and_then_hear_a_typed_error() -> None:
    desk = WorkerTable(posts=1)
    stream, sink = desk.connect()
    desk.lose_post(0)
    desk.tokens([(stream, [9, 9])])
    assert not sink.ends
    desk.stream_manager.texts.sweep()
    error = cast(SluiceError, sink.ends[0])
    assert (error.kind, error.code) == (ErrorKind.UNAVAILABLE, "service_unavailable")
    desk.check()


def test_an_engine_that_was_done_needs_no_worker_any_more() -> None:
    desk = WorkerTable()
    stream, sink = desk.connect()
    desk.stream_manager.on_ended(stream, FinishReason.LENGTH, None, 5)
    desk.lose_worker(0)
    assert not desk.moving
    assert not sink.ends
    desk.check()


def test_tokens_that_are_complete_need_no_worker_any_more() -> None:
    desk = WorkerTable()
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
    desk = WorkerTable()
    outcomes: list[tuple[str, int | None, int]] = []
    desk.stream_manager._free = lambda *outcome: outcomes.append(outcome)
    stream, sink = desk.connect(0)
    desk.stream_manager.on_started(stream, 1)
    desk.tokens([(stream, [5, 6, 7])])
    desk.lose_worker(0)
    desk.resume(stream, 1)
    desk.stream_manager.on_started(stream, 0)
    desk.tokens([(stream, [8, 9])])
    desk.stream_manager.on_ended(stream, FinishReason.LENGTH, None, 2)
    assert stream.completion_tokens == 5
    desk.stream_manager.on_finished(stream, Finish(FinishReason.LENGTH, completion_tokens=5))
    assert outcomes == [("res-1", 1, 3), ("res-2", 0, 2)]
    assert desk.computed == ["res-1", "res-2"]
    assert (stream.prompt_tokens, stream.cached_tokens) == (1, 1)
    assert cast(Finish, sink.ends[0]).migrations == 1
