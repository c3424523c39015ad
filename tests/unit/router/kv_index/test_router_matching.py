from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.kv_index.matching import bits_of, depths


class CountedTable:
    """Block → bits, as an index would hold them for ranks with these prefixes; counts the look-ups."""

    def __init__(self, reach: dict[int, int]) -> None:
        self._reach = reach
        self.lookups = 0

    def get(self, block: int, none: int) -> int:
        self.lookups += 1
        return sum(1 << bit for bit, depth in self._reach.items() if block < depth) or none


@pytest.mark.parametrize("blocks", [64, 512, 6_250, 100_000, 1_000_000])
def test_a_longer_prompt_costs_its_logarithm(blocks: int) -> None:
    table = CountedTable({0: blocks // 3, 1: blocks // 2, 2: blocks})
    found = dict(depths(table.get, range(blocks)))
    assert found == {1 << 0: blocks // 3, 1 << 1: blocks // 2, 1 << 2: blocks}
    assert table.lookups <= 1 + 3 * math.ceil(math.log2(blocks))


def test_ranks_that_reach_equally_far_are_found_together() -> None:
    table = CountedTable(dict.fromkeys(range(1000), 4000))
    assert list(depths(table.get, range(6_250))) == [((1 << 1_000) - 1, 4_000)]
    assert table.lookups <= 14


@given(st.dictionaries(st.integers(0, 90), st.integers(1, 300), max_size=30), st.integers(1, 300))
def test_every_rank_is_found_once(reach: dict[int, int], blocks: int) -> None:
    found = {bit: depth for mask, depth in depths(CountedTable(reach).get, range(blocks)) for bit in bits_of(mask)}
    assert found == {bit: min(depth, blocks) for bit, depth in reach.items()}


@pytest.mark.parametrize("width", [1, 63, 64, 65, 1_000])
def test_bits_of_narrow_and_wide_masks(width: int) -> None:
    chosen = sorted(Random(width).sample(range(width), max(width // 3, 1)))
    assert sorted(bits_of(sum(1 << bit for bit in chosen))) == chosen
    assert list(bits_of(0)) == []
