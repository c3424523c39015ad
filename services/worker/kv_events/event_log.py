"""The log of one rank's cache: its current blocks, and the numbered event batches that led to them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheTier, KvEvent

BACKLOG_BATCHES = 1_024
BATCH_HASHES = 16_384


@dataclass(frozen=True, slots=True)
class NumberedBatch:
    """Events sent together; sequence numbers start at 1 in each epoch and have no gaps."""

    sequence: int
    events: Sequence[KvEvent]


class KvEventLog:
    """Records the events of one source.

    Events accumulate in an open batch until it is read, so that engine steps faster than the connection share a
    message. Memory is bounded by the size of the cache and of the backlog.

    Attributes:
        rank: data-parallel rank.
        sequence: number of the last closed batch; 0 before the first.
        on_change: called after events were recorded.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sequence = 0
        self.on_change: Callable[[], None] = lambda: None
        self._blocks: dict[CacheTier, set[int]] = {}
        self._backlog: deque[NumberedBatch] = deque(maxlen=BACKLOG_BATCHES)
        self._open: list[KvEvent] = []
        self._open_hashes = 0

    def record(self, events: Sequence[KvEvent]) -> None:
        """Records the events of one engine step."""
        for event in events:
            self._apply(event)
            self._append(event)
        if self._open_hashes >= BATCH_HASHES:
            self._close_batch()
        self.on_change()

    def batches_after(self, sequence: int) -> list[NumberedBatch] | None:
        """Returns all batches after a sequence number, oldest first; None when the backlog lacks some of them."""
        self._close_batch()
        if sequence == self.sequence:
            return []
        if sequence > self.sequence or not self._backlog or self._backlog[0].sequence > sequence + 1:
            return None
        return [batch for batch in self._backlog if batch.sequence > sequence]

    def snapshot(self) -> dict[CacheTier, array[int]]:
        """Returns the block hashes by tier as of `sequence`; tiers without blocks are omitted."""
        self._close_batch()
        return {tier: array("Q", hashes) for tier, hashes in self._blocks.items() if hashes}

    def _apply(self, event: KvEvent) -> None:
        if isinstance(event, BlocksStored):
            self._blocks.setdefault(event.tier, set()).update(event.hashes)
        elif isinstance(event, BlocksRemoved):
            self._blocks.setdefault(event.tier, set()).difference_update(event.hashes)
        else:
            self._blocks.clear()

    def _append(self, event: KvEvent) -> None:
        last = self._open[-1] if self._open else None
        if isinstance(event, CacheCleared):
            self._open[:] = [event]  # supersedes all earlier events
            self._open_hashes = 0
            return
        self._open_hashes += len(event.hashes)
        if type(last) is type(event) and last.tier is event.tier:
            last.hashes.extend(event.hashes)
        else:
            self._open.append(type(event)(event.hashes[:], event.tier))

    def _close_batch(self) -> None:
        if self._open:
            self.sequence += 1
            self._backlog.append(NumberedBatch(self.sequence, self._open))
            self._open, self._open_hashes = [], 0


def chunks(hashes: array[int], size: int) -> Iterator[array[int]]:
    """Yields pieces of at most `size` hashes; one empty piece for no hashes."""
    for start in range(0, max(len(hashes), 1), size):
        yield hashes[start : start + size]
