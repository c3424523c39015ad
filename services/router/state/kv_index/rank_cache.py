"""Cache content of one rank, and the rules for accepting its event batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from services.common.base.packing import pack_u64, unpack_u64
from services.router.state.kv_index.events import HASH_BYTES, CacheOperation, EventBatch, Snapshot
from services.router.state.kv_index.tier import RankTierBlocks


class ApplyResult(Enum):
    """Result of applying a batch or snapshot; `label` is its value, read for every batch."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"  # sequence number already applied: nothing changed
    GAP = "gap"  # an earlier batch is missing: nothing changed, a snapshot is needed
    STALE = "stale"  # unknown worker or different epoch: nothing changed
    OVERFLOW = "overflow"  # more blocks than the model card allows: the worker's events are wrong

    def __init__(self, label: str) -> None:
        self.label = label


class RankCache:
    """Blocks of one rank in one worker epoch, by tier.

    Args:
        capacity: maximum blocks per tier.
        tiers: block sets by tier, empty.
    """

    __slots__ = ("capacity", "epoch", "sequence", "tiers")

    def __init__(self, epoch: int, capacity: int, tiers: Sequence[RankTierBlocks]) -> None:
        self.epoch = epoch
        self.capacity = capacity
        self.sequence = 0
        self.tiers = tiers

    @property
    def blocks(self) -> int:
        """Number of blocks held, counted once per tier."""
        device, host, disk = self.tiers
        return device.count + host.count + disk.count

    def admit(self, epoch: int, sequence: int) -> ApplyResult:
        """Returns APPLIED if a batch with this sequence number is the next one, else the reason to reject it."""
        if epoch != self.epoch:
            return ApplyResult.STALE
        if sequence <= self.sequence:
            return ApplyResult.DUPLICATE
        return ApplyResult.APPLIED if sequence == self.sequence + 1 else ApplyResult.GAP

    def apply(self, epoch: int, batch: EventBatch) -> ApplyResult:
        """Applies a batch if it is the next one. After OVERFLOW the content is undefined; drop the rank."""
        outcome = self.admit(epoch, batch.sequence)
        if outcome is not ApplyResult.APPLIED:
            return outcome
        for kind, tier, hashes in batch.ops:
            tier_blocks = self.tiers[tier]
            if kind is CacheOperation.CLEARED:
                self.clear()
            elif kind is CacheOperation.STORED:
                tier_blocks.store(unpack_u64(hashes))
                if tier_blocks.count > self.capacity:
                    return ApplyResult.OVERFLOW
            else:
                tier_blocks.remove(unpack_u64(hashes))
        self.sequence = batch.sequence
        return outcome

    def replace(self, epoch: int, snapshot: Snapshot) -> ApplyResult:
        """Replaces the content by a snapshot unless that is older."""
        if epoch != self.epoch:
            return ApplyResult.STALE
        if snapshot.sequence < self.sequence:
            return ApplyResult.DUPLICATE
        if max(map(len, snapshot.tiers)) > self.capacity * HASH_BYTES:
            return ApplyResult.OVERFLOW
        self.clear()
        for tier_blocks, hashes in zip(self.tiers, snapshot.tiers, strict=True):
            tier_blocks.store(unpack_u64(hashes))
        self.sequence = snapshot.sequence
        return ApplyResult.APPLIED

    def fill(self, epoch: int, snapshot: Snapshot, step: int) -> Iterator[None]:
        """Loads a snapshot of the same epoch into an empty cache, yielding after every `step` bytes of hashes."""
        if epoch != self.epoch:
            return
        for tier_blocks, hashes in zip(self.tiers, snapshot.tiers, strict=True):
            for start in range(0, len(hashes), step):
                tier_blocks.store(unpack_u64(hashes[start : start + step]))
                yield
        self.sequence = snapshot.sequence

    def clear(self) -> None:
        """Removes all blocks of all tiers."""
        for tier_blocks in self.tiers:
            tier_blocks.clear()

    def snapshot(self, rank: int) -> Snapshot:
        """Returns a copy of the content; hashes are in no particular order."""
        device, host, disk = (pack_u64(tier_blocks.hashes()) for tier_blocks in self.tiers)
        return Snapshot(rank, self.sequence, (device, host, disk))
