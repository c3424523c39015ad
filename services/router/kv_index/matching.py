"""How far into a prompt each rank's cache reaches.

Hashes are chained, so a rank that holds a block holds everything before it: the bits of ranks in the blocks of a prompt
only ever fall away, and where they do is found by bisection instead of a walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

Lookup: TypeAlias = Callable[[int, int], int]
"""`dict.get`: block hash and 0 → bits of the ranks that hold it."""

# Below this many blocks a walk is cheaper than bisecting, and exact even if an engine evicted out of the middle.
_WALK_BELOW = 64


def depths(lookup: Lookup, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(bits of the ranks whose prefix ends there, its length in blocks, at least 1).

    A prompt of n blocks takes n look-ups where it is short, else O(log n) for each length that occurs.

    Args:
        hashes: chained block hashes of the prompt, first block first; at least one.
    """
    mask = lookup(hashes[0], 0)
    if mask:
        yield from (_walk if len(hashes) < _WALK_BELOW else _bisect)(lookup, hashes, mask)


def bits_of(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set, in no order."""
    if mask.bit_length() > 64:  # arithmetic on wide masks costs their width for every bit
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
        kept = mask & lookup(hashes[depth], 0)
        if kept != mask:
            yield mask ^ kept, depth
            mask = kept
            if not mask:
                return
    yield mask, len(hashes)


def _bisect(lookup: Lookup, hashes: Sequence[int], mask: int) -> Iterator[tuple[int, int]]:
    """Halves the prompt; ranks that part at a half are searched for on their own side, with no probe made twice."""
    undecided = [(mask, 0, len(hashes))]  # of these ranks, all hold the block `low` and none the block `high`
    while undecided:
        mask, low, high = undecided.pop()
        while high - low > 1:
            middle = (low + high) >> 1
            kept = mask & lookup(hashes[middle], 0)
            if kept == mask:
                low = middle
                continue
            if kept:
                undecided.append((kept, middle, high))
                mask ^= kept
            high = middle
        yield mask, high
