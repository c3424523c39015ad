"""The block index of one model: which rank holds which prefix, answered without I/O.

A rank is a bit; per tier a dict maps a block hash to the bits of the ranks that hold it. Hashes are chained, so a rank
that holds a block holds everything before it, and a long prompt is matched by bisection. Clearing a rank costs O(its
blocks), and no rank can hold more than its card says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from services.router.events import EventBatch, Snapshot
from services.router.holding import Holding, Outcome
from services.router.tier import Shelf, TierTable
from services.router.workers import Slot

# Below this many blocks a walk is cheaper than bisecting, and exact even if an engine evicted out of the middle.
_WALK_BELOW = 64

_Lookup = Callable[[int, int], int]


class Overlap(NamedTuple):
    """Leading blocks of a prompt by the nearest tier that holds them: first device, then host, then disk."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def blocks(self) -> int:
        """Blocks held on any tier."""
        return self.device + self.host + self.disk


NO_OVERLAP = Overlap()


class BlockIndex:
    """Block hash → ranks, with epochs, sequence numbers and bounds per rank."""

    def __init__(self) -> None:
        self._tables = (TierTable(), TierTable(), TierTable())
        self._holdings: dict[Slot, Holding] = {}
        self._bits: dict[Slot, int] = {}
        self._slot_of_bit: dict[int, Slot] = {}

    @property
    def slots(self) -> list[Slot]:
        """All ranks known."""
        return list(self._holdings)

    @property
    def distinct_blocks(self) -> int:
        """Entries in the tables."""
        return sum(map(len, self._tables))

    def holding(self, slot: Slot) -> Holding | None:
        """What a rank holds, to be read only."""
        return self._holdings.get(slot)

    def blocks(self, slot: Slot) -> int:
        """How many blocks a rank holds; 0 for an unknown one."""
        holding = self._holdings.get(slot)
        return holding.blocks if holding else 0

    def sequences(self, slots: Iterable[Slot]) -> dict[int, int]:
        """The last sequence number applied, by rank, for ranks that have one."""
        holdings = {slot.rank: self._holdings.get(slot) for slot in slots}
        return {rank: holding.sequence for rank, holding in holdings.items() if holding and holding.sequence}

    def open(self, slot: Slot, epoch: int, capacity: int) -> None:
        """Makes room for a rank. A new epoch starts empty; the same epoch keeps what is there."""
        holding = self._holdings.get(slot)
        if holding is not None and holding.epoch == epoch:
            holding.capacity = capacity
            return
        self.drop(slot)
        bit = _lowest_free(self._slot_of_bit)
        self._bits[slot] = bit
        self._slot_of_bit[bit] = slot
        self._holdings[slot] = Holding(epoch, capacity, [Shelf(table, 1 << bit) for table in self._tables])

    def drop(self, slot: Slot) -> None:
        """Forgets a rank; O(its blocks)."""
        holding = self._holdings.pop(slot, None)
        if holding is None:
            return
        holding.clear()
        del self._slot_of_bit[self._bits.pop(slot)]

    def apply(self, slot: Slot, epoch: int, batch: EventBatch) -> Outcome:
        """Applies a batch if it is the next one of its rank; after OVERFLOW the rank must be dropped."""
        holding = self._holdings.get(slot)
        return Outcome.STALE if holding is None else holding.apply(epoch, batch)

    def replace(self, slot: Slot, epoch: int, snapshot: Snapshot) -> Outcome:
        """Replaces a rank's blocks unless the snapshot is older than what is held."""
        holding = self._holdings.get(slot)
        return Outcome.STALE if holding is None else holding.replace(epoch, snapshot)

    def match(self, hashes: Sequence[int]) -> dict[Slot, Overlap]:
        """How much of a prompt each rank holds as a prefix; ranks with nothing are left out.

        Args:
            hashes: chained block hashes of the prompt, first block first.
        """
        if not hashes:
            return {}
        device, host, disk = (table.holders for table in self._tables)
        on_device = _depths(device.get, hashes)
        if not host and not disk:
            return {self._slot_of_bit[bit]: Overlap(depth) for bit, depth in on_device.items()}
        up_to_host = _depths(lambda h, none: device.get(h, none) | host.get(h, none), hashes)
        up_to_disk = _depths(lambda h, none: device.get(h, none) | host.get(h, none) | disk.get(h, none), hashes)
        found: dict[Slot, Overlap] = {}
        for bit, reach in up_to_disk.items():
            near, middle = on_device.get(bit, 0), up_to_host.get(bit, 0)
            found[self._slot_of_bit[bit]] = Overlap(near, middle - near, reach - middle)
        return found


def _lowest_free(taken: dict[int, Slot]) -> int:
    """Bits are reused so that the masks stay short."""
    bit = 0
    while bit in taken:
        bit += 1
    return bit


def _depths(lookup: _Lookup, hashes: Sequence[int]) -> dict[int, int]:
    """Bit → length of the prefix it holds, for the bits that hold any."""
    mask = lookup(hashes[0], 0)
    if not mask:
        return {}
    search = _walk if len(hashes) < _WALK_BELOW else _bisect
    depths: dict[int, int] = {}
    for lost, depth in search(lookup, hashes, mask):
        for bit in _bits_of(lost):
            depths[bit] = depth
    return depths


def _walk(lookup: _Lookup, hashes: Sequence[int], mask: int) -> Iterator[tuple[int, int]]:
    """(bits whose prefix ends there, its length), block by block."""
    for depth in range(1, len(hashes)):
        kept = mask & lookup(hashes[depth], 0)
        if kept != mask:
            yield mask ^ kept, depth
            mask = kept
            if not mask:
                return
    yield mask, len(hashes)


def _bisect(lookup: _Lookup, hashes: Sequence[int], mask: int) -> Iterator[tuple[int, int]]:
    """The same in O(distinct depths · log blocks) look-ups."""
    low = 0  # every bit of mask holds the blocks up to here
    while mask:
        high = len(hashes)  # some bit of mask does not hold this one
        while high - low > 1:
            middle = (low + high) // 2
            if lookup(hashes[middle], 0) & mask == mask:
                low = middle
            else:
                high = middle
        kept = mask & lookup(hashes[high], 0) if high < len(hashes) else 0
        yield mask ^ kept, high
        mask, low = kept, high


def _bits_of(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
