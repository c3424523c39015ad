"""Messages between an attached worker and the router, their queue, and the limit of their rate."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.moving_deadline import MovingDeadline
from services.common.rpc.session import WINDOW_S as FRAMES_WINDOW_S
from services.common.rpc.session import FramePace
from services.router.state.kv_index.events import HASH_BYTES, EventBatch, Tier
from services.router.state.workers.worker import Worker

WINDOW_S = 10.0
MAX_MESSAGES_OF_RANK = 5_000
"""Messages of one rank in 10 s, of which a Sluice worker sends 500; with more the worker is disconnected, `flood`."""
MAX_MESSAGES = 50_000
"""Messages of one worker in 10 s, however many ranks, 0.1 ms each; with more it is disconnected, `flood`."""
READ_FACTOR = 1.2
"""Rate at which a stream is read, as a multiple of those limits, so that only floods wait, and still exceed them."""
MAX_HASHES = 64_000_000
"""Block hashes of one worker in 10 s, whatever the size of its cache; with more it is disconnected, `flood`."""
MIN_HASHES = 1_000_000
"""Block hashes that a rank may always send in 10 s, however small its cache is."""
MAX_TURNOVERS = 20
"""Complete caches of a rank as block hashes in 10 s; with more the worker is disconnected, `flood`."""
MAX_INBOX_BYTES = 8 << 20
"""Bytes of one worker's messages that wait to be handled; beyond it nothing further is read until then."""
BYTES_PER_OP = 128

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load report of the worker, as the transport encodes it."""

    document: bytes


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """Part of a rank's snapshot."""

    rank: int
    sequence: int
    tier: Tier
    hashes: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class Leaving:
    """The worker accepts no new requests."""

    reason: str


WorkerMessage: TypeAlias = LoadReport | EventBatch | SnapshotChunk | Leaving


@dataclass(slots=True)
class Replies:
    """Replies to a worker: durable sequence numbers by rank, and ranks whose snapshots are requested, with reasons.

    `outcomes` counts event batches by result, for metrics; it is not sent to the worker.
    """

    acks: dict[int, int] = field(default_factory=dict)
    resyncs: dict[int, str] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)


class Inbox(Generic[T]):
    """Queue that accepts single items and returns all queued items at once; `put` waits while it is full.

    Args:
        limit: items with which it is full.
        max_bytes: bytes with which it is full.
        size: returns the bytes of an item.
    """

    def __init__(self, limit: int, max_bytes: int = MAX_INBOX_BYTES, size: Callable[[T], int] = lambda item: 0) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._size = size
        self._bytes = 0
        self._items: deque[T] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self._silence = MovingDeadline(self._on_silence)
        self._space = asyncio.Event()
        self._full = False
        self._ended = False
        self._error: SluiceError | None = None

    async def put(self, item: T) -> None:
        """Adds an item, after waiting for space."""
        while self._full:
            await self._space.wait()
        self._items.append(item)
        self._bytes += self._size(item)
        if len(self._items) >= self._limit or self._bytes >= self._max_bytes:
            self._full = True
            self._space.clear()
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def end(self, error: SluiceError | None = None) -> None:
        """Closes the inbox. With an error, the next `take` raises that instead of returning the queued items."""
        self._ended = True
        self._error = self._error or error
        self._silence.close()
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _on_silence(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_exception(TimeoutError())

    async def take(self, timeout_s: float) -> list[T]:
        """Waits for items and returns all of them; returns an empty list after the end.

        Raises:
            SluiceError: the error passed to `end`.
            TimeoutError: no item arrived in time.
        """
        if not self._items and not self._ended:
            loop = asyncio.get_running_loop()
            self._arrived = loop.create_future()
            self._silence.move(loop.time() + timeout_s)
            try:
                await self._arrived
            finally:
                self._arrived = None
        items = list(self._items)
        self._items.clear()
        self._bytes = 0
        if self._error is not None:
            items, error, self._error = [], self._error, None
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame and to the stream
        if self._full:
            self._full = False
            self._space.set()
        return items


def size_of(message: WorkerMessage) -> int:
    """Returns about how many bytes a message takes."""
    if isinstance(message, EventBatch):
        return message.bytes + BYTES_PER_OP * len(message.ops)
    if isinstance(message, LoadReport):
        return len(message.document)
    return len(message.hashes) if isinstance(message, SnapshotChunk) else 0


def hashes_of(message: WorkerMessage) -> int:
    """Returns the number of block hashes in a message."""
    if isinstance(message, EventBatch):
        return message.bytes // HASH_BYTES
    return len(message.hashes) // HASH_BYTES if isinstance(message, SnapshotChunk) else 0


def _most_messages(worker: Worker) -> int:
    return min(MAX_MESSAGES_OF_RANK * worker.ranks, MAX_MESSAGES)


def read_pace(worker: Worker) -> FramePace:
    """Returns the pace at which the messages of a worker are read."""
    return FramePace(round(READ_FACTOR * _most_messages(worker) * FRAMES_WINDOW_S / WINDOW_S))


class FloodGuard:
    """Counts the messages of one worker in fixed windows.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, worker: Worker, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker_id = worker.worker_id
        self._most_messages = _most_messages(worker)
        most_hashes = max(MIN_HASHES, MAX_TURNOVERS * worker.total_blocks) * worker.ranks
        self._most_hashes = min(most_hashes, MAX_HASHES)
        self._clock = clock
        self._until = 0.0
        self._messages = 0
        self._hashes = 0

    def count(self, messages: int, hashes: int) -> None:
        """Counts received messages.

        Raises:
            SluiceError: OVERLOADED if a limit is exceeded; the caller must disconnect the worker.
        """
        now = self._clock()
        if now >= self._until:
            self._until = now + WINDOW_S
            self._messages = self._hashes = 0
        self._messages += messages
        self._hashes += hashes
        if self._messages > self._most_messages or self._hashes > self._most_hashes:
            raise SluiceError(
                ErrorKind.OVERLOADED,
                f"Worker {self._worker_id} sent too much: {self._messages} messages with {self._hashes} block hashes "
                f"in {WINDOW_S:g} s; the limits are {self._most_messages} and {self._most_hashes}.",
                code="flood",
                retry_after_ms=int(WINDOW_S * 1000),
            )
