"""Blocks of one memory tier and the ranks that hold them, at about 100 bytes per block.

A dict maps a block hash to the bits of the ranks that hold it; equal masks share one object. There is no set of blocks
per rank: a log of the stored hashes, 8 bytes each, suffices to list them, because the dict tells which are still held.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

_LOGS = 32  # each log is compacted in one go; several short ones keep that fast
_SLACK = 64  # removed entries that a log may have before it is compacted
_MAX_MASKS = 65_536


class RankTierBlocks:
    """Blocks of one rank on one tier."""

    __slots__ = ("_logs", "_next", "_table", "bit", "count")

    def __init__(self, table: TierTable, bit: int) -> None:
        self.bit = bit
        self.count = 0
        self._table = table
        self._logs: list[array[int]] = []
        self._next = 0

    def store(self, hashes: Iterable[int]) -> None:
        """Adds blocks."""
        if not self._logs:
            self._logs = [array("Q") for _ in range(_LOGS)]
        bit, holders, logs = self.bit, self._table.holders, self._logs
        get, shared = holders.get, self._table.shared
        count = 0
        for block in hashes:
            before = get(block)
            if before is None:
                holders[block] = bit
            elif before & bit:
                continue
            else:
                holders[block] = shared(before | bit)
            logs[block % _LOGS].append(block)
            count += 1
        self.count += count
        self._tidy(count)

    def remove(self, hashes: Iterable[int]) -> None:
        """Removes blocks; ignores those that are not held."""
        bit, holders = self.bit, self._table.holders
        get, shared = holders.get, self._table.shared
        count = 0
        for block in hashes:
            before = get(block, 0)
            if before == bit:
                del holders[block]
            elif before & bit:
                holders[block] = shared(before ^ bit)
            else:
                continue
            count += 1
        self.count -= count

    def clear(self) -> None:
        """Removes all blocks; takes time proportional to their number."""
        for log in self._logs:
            self.remove(log)
        self._logs = []

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(self.hashes())

    def hashes(self) -> array[int]:
        """Returns the hashes of all blocks, in no particular order."""
        found = array("Q")
        for log in self._logs:
            found.extend(self._alive(log))
        return found

    def _alive(self, log: array[int]) -> array[int]:
        bit, get = self.bit, self._table.holders.get
        return array("Q", {block for block in log if get(block, 0) & bit})

    def _tidy(self, stored: int) -> None:
        """Compacts logs that consist mostly of removed entries; checks more logs the more blocks were stored."""
        for _ in range(min(stored // _LOGS + 1, _LOGS)):
            self._next = (self._next + 1) % _LOGS
            log = self._logs[self._next]
            if len(log) > 2 * self.count // _LOGS + _SLACK:
                self._logs[self._next] = self._alive(log)


class TierTable:
    """Maps block hashes to the bits of the ranks that hold them."""

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self._masks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.holders)

    def shared(self, mask: int) -> int:
        """Returns a shared object equal to the mask, so that equal masks are stored once."""
        if len(self._masks) >= _MAX_MASKS:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)
