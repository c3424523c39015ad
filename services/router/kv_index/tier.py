"""The blocks of one tier: which ranks hold which, at about 100 bytes a block.

A dict maps a block hash to the bits of the ranks that hold it; equal masks are one object. What a rank holds is not
kept a second time as a set: a log of the hashes it stored, 8 bytes each, is enough to list them, because the dict says
which of them it still holds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

_LOGS = 32  # a log is compacted at once; parts keep that short
_SLACK = 64  # dead entries a log may always have
_MOST_MASKS = 65_536


class Shelf:
    """One rank's blocks of one tier."""

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
        """Takes blocks away; those that are not held do not matter."""
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
        """Takes all blocks away; O(blocks)."""
        for log in self._logs:
            self.remove(log)
        self._logs = []

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(self.hashes())

    def hashes(self) -> array[int]:
        """All blocks, in no order."""
        found = array("Q")
        for log in self._logs:
            found.extend(self._alive(log))
        return found

    def _alive(self, log: array[int]) -> array[int]:
        bit, get = self.bit, self._table.holders.get
        return array("Q", {block for block in log if get(block, 0) & bit})

    def _tidy(self, stored: int) -> None:
        """Drops dead entries from logs that are mostly dead, a log for every so many blocks stored."""
        for _ in range(min(stored // _LOGS + 1, _LOGS)):
            self._next = (self._next + 1) % _LOGS
            log = self._logs[self._next]
            if len(log) > 2 * self.count // _LOGS + _SLACK:
                self._logs[self._next] = self._alive(log)


class TierTable:
    """Block hash → bits of the ranks that hold it."""

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self._masks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.holders)

    def shared(self, mask: int) -> int:
        """An equal mask that others use too."""
        if len(self._masks) >= _MOST_MASKS:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)
