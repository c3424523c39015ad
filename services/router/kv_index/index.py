"""The block index of one model: which rank holds which prefix, answered without I/O.

A rank is a bit; per tier a dict maps a block hash to the bits of the ranks that hold it. Hashes are chained, so a rank
that holds a block holds everything before it, and a long prompt is matched by bisection. Clearing a rank costs O(its
blocks), and no rank can hold more than its card says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from services.router.kv_index.events import EventBatch, Snapshot
from services.router.kv_index.matching import Lookup, bits_of, depths
from services.router.kv_index.rank_cache import Outcome, RankCache
from services.router.kv_index.tier import Shelf, TierTable
from services.router.workers.worker import WorkerRank


class Overlap(NamedTuple):
    """Leading blocks of a prompt by the nearest tier that holds them: first device, then host, then disk.

    `predicted`: blocks after those that nobody reported but that are expected. `computing`: how many of the predicted
    are being computed for other requests, so that they are in the rank's booked prefill already.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    predicted: int = 0
    computing: int = 0

    @property
    def blocks(self) -> int:
        """Blocks held on any tier."""
        return self.device + self.host + self.disk


NO_OVERLAP = Overlap()


class BlockIndex:
    """Block hash → ranks, with epochs, sequence numbers and bounds per rank."""

    def __init__(self) -> None:
        self._tables = (TierTable(), TierTable(), TierTable())
        self._holdings: dict[WorkerRank, RankCache] = {}
        self._bits: dict[WorkerRank, int] = {}
        self._slot_of_bit: dict[int, WorkerRank] = {}
        self._eights: dict[tuple[int, int], tuple[WorkerRank, ...]] = {}  # (place of a byte, its value) → ranks

    @property
    def slots(self) -> list[WorkerRank]:
        """All ranks known."""
        return list(self._holdings)

    @property
    def distinct_blocks(self) -> int:
        """Entries in the tables."""
        return sum(map(len, self._tables))

    def holding(self, slot: WorkerRank) -> RankCache | None:
        """What a rank holds, to be read only."""
        return self._holdings.get(slot)

    def blocks(self, slot: WorkerRank) -> int:
        """How many blocks a rank holds; 0 for an unknown one."""
        holding = self._holdings.get(slot)
        return holding.blocks if holding else 0

    def holds(self, slot: WorkerRank, block: int) -> bool:
        """Whether a rank holds a block on any tier."""
        bit = self._bits.get(slot)
        return bit is not None and any(table.holders.get(block, 0) >> bit & 1 for table in self._tables)

    def sequences(self, slots: Iterable[WorkerRank]) -> dict[int, int]:
        """The last sequence number applied, by rank, for ranks that have one."""
        holdings = {slot.rank: self._holdings.get(slot) for slot in slots}
        return {rank: holding.sequence for rank, holding in holdings.items() if holding and holding.sequence}

    def open(self, slot: WorkerRank, epoch: int, capacity: int) -> None:
        """Makes room for a rank. A new epoch starts empty; the same epoch keeps what is there."""
        holding = self._holdings.get(slot)
        if holding is not None and holding.epoch == epoch:
            holding.capacity = capacity
            return
        self.drop(slot)
        bit = _lowest_free(self._slot_of_bit)
        self._bits[slot] = bit
        self._slot_of_bit[bit] = slot
        self._eights.clear()
        self._holdings[slot] = RankCache(epoch, capacity, [Shelf(table, 1 << bit) for table in self._tables])

    def drop(self, slot: WorkerRank) -> None:
        """Forgets a rank; O(its blocks)."""
        holding = self._holdings.pop(slot, None)
        if holding is None:
            return
        holding.clear()
        del self._slot_of_bit[self._bits.pop(slot)]
        self._eights.clear()

    def apply(self, slot: WorkerRank, epoch: int, batch: EventBatch) -> Outcome:
        """Applies a batch if it is the next one of its rank; after OVERFLOW the rank must be dropped."""
        holding = self._holdings.get(slot)
        return Outcome.STALE if holding is None else holding.apply(epoch, batch)

    def replace(self, slot: WorkerRank, epoch: int, snapshot: Snapshot) -> Outcome:
        """Replaces a rank's blocks unless the snapshot is older than what is held."""
        holding = self._holdings.get(slot)
        return Outcome.STALE if holding is None else holding.replace(epoch, snapshot)

    def filling(self, slot: WorkerRank, epoch: int, snapshot: Snapshot, step: int) -> Iterator[None]:
        """Takes a snapshot of a rank that holds nothing, `step` bytes of hashes between two yields."""
        holding = self._holdings.get(slot)
        return iter(()) if holding is None else holding.filling(epoch, snapshot, step)

    def match(self, hashes: Sequence[int]) -> dict[WorkerRank, Overlap]:
        """How much of a prompt each rank holds as a prefix; ranks with nothing are left out.

        Args:
            hashes: chained block hashes of the prompt, first block first.
        """
        if not hashes:
            return {}
        device, host, disk = (table.holders for table in self._tables)
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
        """As if all that `lookup` finds were on the device; ranks with the same overlap share one object."""
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
        return chain.from_iterable(self._eights.get(eight) or self._eight(eight) for eight in bytewise if eight[1])

    def _eight(self, eight: tuple[int, int]) -> tuple[WorkerRank, ...]:
        """The ranks of a byte of a mask; kept, because many ranks share the beginning of a prompt."""
        place, byte = eight
        slots = self._eights[eight] = tuple(self._slot_of_bit[8 * place + bit] for bit in bits_of(byte))
        return slots


def _lowest_free(taken: dict[int, WorkerRank]) -> int:
    """Bits are reused so that the masks stay short."""
    bit = 0
    while bit in taken:
        bit += 1
    return bit
