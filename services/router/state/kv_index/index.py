"""Block index of one model: matches prompts to the ranks that hold their prefixes, without I/O.

Each rank is a bit; per tier, a dict maps a block hash to the bits of the ranks that hold the block. Hashes are chained,
so a rank that holds a block holds the whole prefix before it, and long prompts are matched by bisection. Clearing a
rank takes time proportional to its blocks, and the number of blocks per rank is bounded by its model card.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count
from typing import NamedTuple

from services.router.state.kv_index.events import EventBatch, Snapshot
from services.router.state.kv_index.matching import Lookup, bits_of, depths
from services.router.state.kv_index.rank_cache import ApplyResult, RankCache
from services.router.state.kv_index.tier import RankTierBlocks, TierTable
from services.router.state.workers.worker import WorkerRank


class Overlap(NamedTuple):
    """Leading blocks of a prompt that a rank holds, by tier: first device, then host, then disk.

    Attributes:
        predicted: further blocks that the rank has not reported but is expected to hold.
        computing: predicted blocks still being computed for other requests, which the rank's reserved prefill includes.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    predicted: int = 0
    computing: int = 0

    @property
    def blocks(self) -> int:
        """Number of blocks held on any tier."""
        return self.device + self.host + self.disk


NO_OVERLAP = Overlap()


class BlockIndex:
    """Maps block hashes to ranks; checks epochs, sequence numbers and capacity of each rank."""

    def __init__(self) -> None:
        self._tables = (TierTable(), TierTable(), TierTable())
        self._caches: dict[WorkerRank, RankCache] = {}
        self._bits: dict[WorkerRank, int] = {}
        self._slot_of_bit: dict[int, WorkerRank] = {}
        self._ranks_by_byte: dict[tuple[int, int], tuple[WorkerRank, ...]] = {}  # (byte index, byte value) → ranks

    @property
    def slots(self) -> list[WorkerRank]:
        """All ranks of the index."""
        return list(self._caches)

    @property
    def distinct_blocks(self) -> int:
        """Number of entries in the tables of all tiers."""
        return sum(map(len, self._tables))

    def cache(self, slot: WorkerRank) -> RankCache | None:
        """Returns a rank's cache content, which the caller must not change."""
        return self._caches.get(slot)

    def blocks(self, slot: WorkerRank) -> int:
        """Returns the number of blocks a rank holds; 0 for an unknown rank."""
        cache = self._caches.get(slot)
        return cache.blocks if cache else 0

    def holds(self, slot: WorkerRank, block: int) -> bool:
        """Returns whether a rank holds a block on any tier."""
        if (bit := self._bits.get(slot)) is None:
            return False
        device, host, disk = self._tables
        held = device.holders.get(block, 0) | host.holders.get(block, 0) | disk.holders.get(block, 0)
        return bool(held >> bit & 1)

    def sequences(self, slots: Iterable[WorkerRank]) -> dict[int, int]:
        """Returns the last applied sequence number by rank, for ranks that have one."""
        caches = {slot.rank: self._caches.get(slot) for slot in slots}
        return {rank: cache.sequence for rank, cache in caches.items() if cache and cache.sequence}

    def open(self, slot: WorkerRank, epoch: int, capacity: int) -> None:
        """Adds a rank. A new epoch starts empty; the same epoch keeps its blocks."""
        cache = self._caches.get(slot)
        if cache is not None and cache.epoch == epoch:
            cache.capacity = capacity
            return
        self.drop(slot)
        bit = next(bit for bit in count() if bit not in self._slot_of_bit)  # reuse keeps the masks short
        self._bits[slot] = bit
        self._slot_of_bit[bit] = slot
        self._ranks_by_byte.clear()
        self._caches[slot] = RankCache(epoch, capacity, [RankTierBlocks(table, 1 << bit) for table in self._tables])

    def drop(self, slot: WorkerRank) -> None:
        """Removes a rank; takes time proportional to its blocks."""
        cache = self._caches.pop(slot, None)
        if cache is None:
            return
        cache.clear()
        del self._slot_of_bit[self._bits.pop(slot)]
        self._ranks_by_byte.clear()

    def apply(self, slot: WorkerRank, epoch: int, batch: EventBatch) -> ApplyResult:
        """Applies a batch if it is the next one of its rank. After OVERFLOW the caller must drop the rank."""
        cache = self._caches.get(slot)
        return ApplyResult.STALE if cache is None else cache.apply(epoch, batch)

    def replace(self, slot: WorkerRank, epoch: int, snapshot: Snapshot) -> ApplyResult:
        """Replaces a rank's blocks unless the snapshot is older than the current content."""
        cache = self._caches.get(slot)
        return ApplyResult.STALE if cache is None else cache.replace(epoch, snapshot)

    def fill(self, slot: WorkerRank, epoch: int, snapshot: Snapshot, step: int) -> Iterator[None]:
        """Loads a snapshot into an empty rank, yielding after every `step` bytes of hashes."""
        cache = self._caches.get(slot)
        return iter(()) if cache is None else cache.fill(epoch, snapshot, step)

    def match(self, hashes: Sequence[int]) -> dict[WorkerRank, Overlap]:
        """Returns the overlap of a prompt with each rank; ranks without overlap are omitted.

        Args:
            hashes: chained block hashes of the prompt, first block first.
        """
        if not hashes:
            return {}
        tables = self._tables
        device, host, disk = tables[0].holders, tables[1].holders, tables[2].holders
        if not host and not disk:
            return self._by_slot(device.get, hashes)
        near = self._by_slot(device.get, hashes)
        middle = self._by_slot(lambda h, none: device.get(h, none) | host.get(h, none), hashes)
        far = self._by_slot(lambda h, none: device.get(h, none) | host.get(h, none) | disk.get(h, none), hashes)
        found: dict[WorkerRank, Overlap] = {}
        for slot, reach in far.items():
            on_device, up_to_host = near.get(slot, NO_OVERLAP).device, middle.get(slot, NO_OVERLAP).device
            found[slot] = Overlap(on_device, up_to_host - on_device, reach.device - up_to_host)
        return found

    def _by_slot(self, lookup: Lookup, hashes: Sequence[int]) -> dict[WorkerRank, Overlap]:
        """Returns overlaps that count all blocks found by `lookup` as device; equal overlaps share one object."""
        found: dict[WorkerRank, Overlap] = {}
        for bits, depth in depths(lookup, hashes):
            overlap = Overlap(depth)
            for slot in self._ranks(bits):
                found[slot] = overlap
        return found

    def _ranks(self, bits: int) -> Iterable[WorkerRank]:
        if not bits & (bits - 1):
            return (self._slot_of_bit[bits.bit_length() - 1],)
        bytewise = enumerate(bits.to_bytes(bits.bit_length() // 8 + 1, "little"))
        return chain.from_iterable(
            self._ranks_by_byte.get(key) or self._ranks_of_byte(key) for key in bytewise if key[1]
        )

    def _ranks_of_byte(self, key: tuple[int, int]) -> tuple[WorkerRank, ...]:
        """Returns the ranks of one byte of a mask, and caches them: many ranks share the beginning of a prompt."""
        index, byte = key
        slots = self._ranks_by_byte[key] = tuple(self._slot_of_bit[8 * index + bit] for bit in bits_of(byte))
        return slots
