"""A stream manager between fake workers, fake postprocess replicas and recording sinks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import unpack_u32
from services.common.rpc.breaker import Breaker
from services.gateway.backends.placement.interfaces import Placement
from services.gateway.backends.rpc.postprocess_link import PostLink
from services.gateway.backends.rpc.worker_link import WorkerLink
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
from services.gateway.streams.interfaces import StreamObserver
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.running_memory import RunningShare
from services.gateway.streams.states import TextState
from services.gateway.streams.stream import GenerationStream
from tests.support.fakes.fake_links import FakeLink

EOS = 2
MAX_TOKENS = 40
REQUEST = GenerationRequest("r", "m", TextPrompt("x"), 1, SamplingParams(seed=5), StopParams(min_tokens=2))
PROMPT = TokenizedPrompt(b"\1\0\0\0" * 4, b"", "", b"", array("I", [EOS]).tobytes(), 100, b"")
LOST = SluiceError(ErrorKind.DISCONNECTED, "gone")


class FakeWorker(FakeLink):
    """Records the slots it runs, their seeds, and cancels."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.worker_id = name
        self.peer = f"worker {name}"
        self.connected = True
        self.breaker = Breaker()
        self.slots: set[int] = set()
        self.seeds: list[int | None] = []
        self.cancelled: list[int] = []
        self.unsent: frozenset[int] = frozenset()

    def start(self, stream: GenerationStream, *rest: Any) -> None:
        assert stream.slot not in self.slots
        self.slots.add(stream.slot)
        self.seeds.append(stream.seed)

    def cancel(self, slot: int) -> None:
        self.slots.discard(slot)
        self.cancelled.append(slot)


class FakePost(FakeLink):
    """Keeps the tokens of each stream that it has opened, as a replica does."""

    def __init__(self) -> None:
        super().__init__()
        self.connected = True
        self.retired = False
        self.leaving = False
        self.fed: list[tuple[bytes, bytes, bytes]] = []
        self.held: dict[int, list[int]] = {}
        self.opened: list[tuple[Any, ...]] = []
        self.ends: dict[int, FinishReason] = {}

    def open(self, stream: GenerationStream) -> None:
        assert self.connected
        assert stream.slot not in self.held
        self.held[stream.slot] = list(stream.tokens)
        sent = (stream.text_sent, replace(stream.sent)) if stream.tokens else None
        self.opened.append((stream.request_id, list(stream.tokens), sent))

    def feed(self, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        self.fed.append((slots, counts, token_ids))
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
    """Records the pieces of a choice and its ends."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.ends: list[Finish | SluiceError] = []

    def text(self, piece: str) -> None:
        assert not self.ends
        self.pieces.append(piece)

    def reasoning(self, piece: str) -> None:
        self.text(f"({piece})")

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        self.text(f"{call}:{name}:{arguments}")

    def finish(self, finish: Finish) -> None:
        self.ends.append(finish)

    def fail(self, error: SluiceError) -> None:
        self.ends.append(error)


class StreamTable:
    """A stream manager between fakes, with migrations that the test completes."""

    def __init__(
        self,
        posts: int = 2,
        workers: int = 2,
        max_streams: int = 1000,
        observers: Sequence[StreamObserver] = (),
    ) -> None:
        self.booked: set[str] = set()
        self.reservations = 0
        self.computed: list[str] = []
        self.freed: list[tuple[str, int | None, int]] = []
        self.stream_manager = StreamManager(max_streams, self, GatewayMetrics(), post_wait_s=0, observers=observers)
        self.events = self.stream_manager.events
        self.take_over = self.migrate
        self.rescue: Callable[[GenerationStream, WorkerLink, SluiceError], SluiceError | None] = (
            lambda stream, worker, error: error
        )
        self.workers = [FakeWorker(f"w{number}") for number in range(workers)]
        self.posts = [FakePost() for _ in range(posts)]
        self.stream_manager.texts.links.update(
            {str(number): cast(PostLink, post) for number, post in enumerate(self.posts)}
        )
        self.moving: list[GenerationStream] = []
        self.may_move = True

    def prefill_complete(self, reservation_id: str) -> None:
        self.computed.append(reservation_id)

    def free(self, reservation_id: str, cached_tokens: int | None = None, output_tokens: int = 0) -> None:
        assert output_tokens >= 0
        self.booked.remove(reservation_id)
        self.freed.append((reservation_id, cached_tokens, output_tokens))

    def book(self) -> str:
        self.reservations += 1
        self.booked.add(f"res-{self.reservations}")
        return f"res-{self.reservations}"

    def migrate(self, stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> bool:
        if not (self.may_move and error.retryable):
            return False
        self.stream_manager.suspend(stream)
        stream.migrations += 1
        self.moving.append(stream)
        return True

    def on_handoff(self, stream: GenerationStream, handoff: bytes) -> None:
        raise AssertionError("no stream has a pair")

    def on_interrupted(self, stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> SluiceError | None:
        remaining = self.rescue(stream, worker, error)
        return None if remaining is None or self.take_over(stream, worker, remaining) else remaining

    def connect(
        self,
        worker: int | WorkerLink = 0,
        *,
        request: GenerationRequest = REQUEST,
        prompt: TokenizedPrompt = PROMPT,
        index: int = 0,
        prefill: int | None = None,
        post: int | None = None,
        sink: Sink | None = None,
        custom_text: Any = None,
        memory: RunningShare | None = None,
    ) -> tuple[GenerationStream, Sink]:
        """Starts a stream; `post` is the only replica that may take it, `prefill` the prefill worker of its pair."""
        sink = sink or Sink()
        link = cast(WorkerLink, self.workers[worker]) if isinstance(worker, int) else worker
        for number, replica in enumerate(self.posts):
            replica.retired = post not in (None, number)
        route = Route(link.worker_id, reservation_id=self.book())
        stream = self.stream_manager.connect(
            request,
            index,
            prompt,
            Placement(route, link, None if prefill is None else cast(WorkerLink, self.workers[prefill])),
            MAX_TOKENS,
            cast(Any, sink),
            recovery=self,
            custom_text=custom_text,
            memory=memory,
        )
        for replica in self.posts:
            replica.retired = False
        return stream, sink

    def resume(self, stream: GenerationStream, worker: int) -> None:
        self.moving.remove(stream)
        link = self.workers[worker]
        route = Route(link.worker_id, reservation_id=self.book())
        self.stream_manager.resume(stream, Placement(route, cast(WorkerLink, link)))

    def tokens(self, rows: list[tuple[GenerationStream, list[int]]]) -> None:
        for worker in self.workers:
            of_worker = [(stream, ids) for stream, ids in rows if cast(Any, stream.worker) is worker]
            self.events.on_tokens(
                cast(WorkerLink, worker),
                array("I", [stream.slot for stream, _ in of_worker]).tobytes(),
                array("I", [len(ids) for _, ids in of_worker]).tobytes(),
                array("I", [token for _, ids in of_worker for token in ids]).tobytes(),
            )

    def lose_worker(self, index: int) -> None:
        self.workers[index].slots.clear()
        self.events.on_worker_lost(cast(WorkerLink, self.workers[index]), LOST)

    def lose_post(self, index: int, comes_back: bool = False) -> None:
        post = self.posts[index]
        post.connected = post.leaving = False
        post.clear()
        self.events.on_post_lost(cast(PostLink, post), LOST)
        if comes_back:
            self.connect_post(index)

    def connect_post(self, index: int) -> None:
        post = self.posts[index]
        if not post.connected:
            post.connected = True
            self.events.on_post_connected(cast(PostLink, post))

    def check(self) -> None:
        live = self.stream_manager._streams
        for link in self.workers:
            assert link.live == sum(cast(Any, stream.worker) is link for stream in live.values())
        for post in self.posts:
            assert post.live == sum(cast(Any, stream.post) is post for stream in live.values())
            assert post.held.keys() <= live.keys()
        for stream in live.values():
            if stream.post is None:
                assert stream.text_state is not TextState.OPEN
                assert self.stream_manager.texts._elsewhere[stream.slot] is stream
                continue
            held = cast(FakePost, stream.post)
            assert held.held[stream.slot] == list(stream.tokens), "a gap or a repeat"
            assert (stream.slot in held.ends) == (stream.end is not None)
        assert self.stream_manager.texts._elsewhere.keys() <= live.keys()
        attempts = [stream.attempt for stream in live.values() if stream.attempt is not None]
        assert self.booked == {attempt.route.reservation_id for attempt in attempts if attempt.reserved}
