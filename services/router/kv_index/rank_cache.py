"""What one rank holds, and the rules by which its event batches are accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from services.common.packing import pack_u64, unpack_u64
from services.router.kv_index.events import HASH_BYTES, EventBatch, Kind, Snapshot
from services.router.kv_index.tier import Shelf


class Outcome(Enum):
    """What became of a batch or snapshot."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"  # at or below what is known: nothing changed
    GAP = "gap"  # something before it is missing: nothing changed, a snapshot is needed
    STALE = "stale"  # no such worker, or another epoch: nothing changed
    OVERFLOW = "overflow"  # more blocks than the card allows: the worker cannot be believed


class RankCache:
    """The blocks of one rank in one epoch, by tier.

    Args:
        epoch: of the worker.
        capacity: most blocks per tier.
        tiers: empty shelves, by tier.
    """

    __slots__ = ("capacity", "epoch", "sequence", "tiers")

    def __init__(self, epoch: int, capacity: int, tiers: Sequence[Shelf]) -> None:
        self.epoch = epoch
        self.capacity = capacity
        self.sequence = 0
        self.tiers = tiers

    @property
    def blocks(self) -> int:
        """Blocks held, counted once per tier."""
        return sum(map(len, self.tiers))

    def admit(self, epoch: int, sequence: int) -> Outcome:
        """Whether a batch with this sequence number is the next one."""
        if epoch != self.epoch:
            return Outcome.STALE
        if sequence <= self.sequence:
            return Outcome.DUPLICATE
        return Outcome.APPLIED if sequence == self.sequence + 1 else Outcome.GAP

    def apply(self, epoch: int, batch: EventBatch) -> Outcome:
        """Applies a batch if it is the next one. After OVERFLOW the content is undefined: drop the worker."""
        outcome = self.admit(epoch, batch.sequence)
        if outcome is not Outcome.APPLIED:
            return outcome
        for kind, tier, hashes in batch.ops:
            shelf = self.tiers[tier]
            if kind is Kind.CLEARED:
                self.clear()
            elif kind is Kind.STORED:
                shelf.store(unpack_u64(hashes))
                if shelf.count > self.capacity:
                    return Outcome.OVERFLOW
            else:
                shelf.remove(unpack_u64(hashes))
        self.sequence = batch.sequence
        return outcome

    def replace(self, epoch: int, snapshot: Snapshot) -> Outcome:
        """Takes a snapshot unless it is older than what is held."""
        if epoch != self.epoch:
            return Outcome.STALE
        if snapshot.sequence < self.sequence:
            return Outcome.DUPLICATE
        if max(map(len, snapshot.tiers)) > self.capacity * HASH_BYTES:
            return Outcome.OVERFLOW
        self.clear()
        for shelf, hashes in zip(self.tiers, snapshot.tiers, strict=True):
            shelf.store(unpack_u64(hashes))
        self.sequence = snapshot.sequence
        return Outcome.APPLIED

    def filling(self, epoch: int, snapshot: Snapshot, step: int) -> Iterator[None]:
        """Takes a snapshot into an empty holding, `step` bytes of hashes between two yields; not of another epoch."""
        if epoch != self.epoch:
            return
        for shelf, hashes in zip(self.tiers, snapshot.tiers, strict=True):
            for start in range(0, len(hashes), step):
                shelf.store(unpack_u64(hashes[start : start + step]))
                yield
        self.sequence = snapshot.sequence

    def clear(self) -> None:
        """Forgets all blocks of all tiers."""
        for shelf in self.tiers:
            shelf.clear()

    def snapshot(self, rank: int) -> Snapshot:
        """A copy; hashes in no order."""
        device, host, disk = (pack_u64(shelf.hashes()) for shelf in self.tiers)
        return Snapshot(rank, self.sequence, (device, host, disk))
