"""Finds the length of the prompt prefix that each rank holds.

Hashes are chained, so a rank that holds a block holds the whole prefix before it. From block to block of a prompt,
ranks only drop out; bisection finds the blocks where they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

Lookup: TypeAlias = Callable[[int, int], int]
"""A `dict.get`: maps a block hash and the default 0 to the bits of the ranks that hold the block."""

# Below this many blocks a linear walk is cheaper, and exact even if an engine evicted a block from the middle.
_WALK_BELOW = 64


def depths(lookup: Lookup, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (bits of ranks, length in blocks of the prefix that they hold, at least 1).

    A short prompt of n blocks takes n lookups, a long one O(log n) lookups for each distinct prefix length.

    Args:
        hashes: chained block hashes of the prompt, first block first; at least one.
    """
    mask = lookup(hashes[0], 0)
    if mask:
        yield from (_walk if len(hashes) < _WALK_BELOW else _bisect)(lookup, hashes, mask)


def bits_of(mask: int) -> Iterator[int]:
    """Yields the indexes of the set bits, in no particular order."""
    if mask.bit_length() > 64:  # arithmetic on wide integers costs their width for every bit
        digits = bin(mask)[:1:-1]
        at = digits.find("1")
        while at >= 0:
            yield at
            at = digits.find("1", at + 1)
        return
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _walk(lookup: Lookup, hashes: Sequence[int], mask: int) -> Iterator[tuple[int, int]]:
    for depth in range(1, len(hashes)):
        remaining = mask & lookup(hashes[depth], 0)
        if remaining != mask:
            yield mask ^ remaining, depth
            mask = remaining
            if not mask:
                return
    yield mask, len(hashes)


def _bisect(lookup: Lookup, hashes: Sequence[int], mask: int) -> Iterator[tuple[int, int]]:
    """Bisects the prompt; a probe that separates the ranks splits the search, so no block is probed twice."""
    undecided = [
        (mask, 0, len(hashes))
    ]  # (ranks, low, high): all of the ranks hold block `low`, none holds block `high`
    while undecided:
        mask, low, high = undecided.pop()
        while high - low > 1:
            middle = (low + high) >> 1
            remaining = mask & lookup(hashes[middle], 0)
            if remaining == mask:
                low = middle
                continue
            if remaining:
                undecided.append((remaining, middle, high))
                mask ^= remaining
            high = middle
        yield mask, high
