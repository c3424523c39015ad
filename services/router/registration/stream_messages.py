"""Messages between an attached worker and the router, their queue, and the limit of their rate."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from services.common.errors import ErrorKind, SluiceError
from services.router.kv_index.events import EventBatch, Tier
from services.router.workers.worker import Worker

WINDOW_S = 10.0
MOST_MESSAGES = 50_000  # per window and rank; a Sluice worker sends at most 50 per second
LEAST_HASHES = 1_000_000  # allowed per window and rank, however small the cache is
MOST_TURNOVERS = 20  # of the complete cache per window

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
    outcomes: Counter[str] = field(default_factory=Counter)


class Inbox(Generic[T]):
    """Queue that accepts single items and returns all queued items at once; `put` waits while it has `limit` items."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[T] = deque()
        self._ready = asyncio.Event()
        self._space = asyncio.Event()
        self._space.set()
        self._ended = False
        self._error: SluiceError | None = None

    async def put(self, item: T) -> None:
        """Adds an item, after waiting for space."""
        await self._space.wait()
        self._items.append(item)
        if len(self._items) >= self._limit:
            self._space.clear()
        self._ready.set()

    def end(self, error: SluiceError | None = None) -> None:
        """Closes the inbox. With an error, `take` raises that instead of returning the queued items."""
        self._ended = True
        self._error = self._error or error
        self._ready.set()

    async def take(self, timeout_s: float) -> list[T]:
        """Waits for items and returns all of them; returns an empty list after the end.

        Raises:
            SluiceError: the error passed to `end`.
            TimeoutError: no item arrived in time.
        """
        if not self._items and not self._ended:
            await asyncio.wait_for(self._ready.wait(), timeout_s)
        if self._error is not None:
            raise self._error
        items = list(self._items)
        self._items.clear()
        if not self._ended:
            self._ready.clear()
        self._space.set()
        return items


class FloodGuard:
    """Counts the messages of one worker in fixed windows.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, worker: Worker, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker_id = worker.worker_id
        self._most_messages = MOST_MESSAGES * worker.ranks
        self._most_hashes = max(LEAST_HASHES, MOST_TURNOVERS * worker.total_blocks) * worker.ranks
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
