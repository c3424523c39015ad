"""A tier's blocks: what ranks hold, listed from logs that stay short."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.kv_index.tier import RankTierBlocks, TierTable

steps = st.lists(st.tuples(st.booleans(), st.booleans(), st.lists(st.integers(0, 40), max_size=8)), max_size=60)


@given(steps)
def test_shelves_list_what_a_set_would_hold(steps: list[tuple[bool, bool, list[int]]]) -> None:
    table = TierTable()
    shelves = [RankTierBlocks(table, 1), RankTierBlocks(table, 2)]
    models: list[set[int]] = [set(), set()]
    for first, storing, hashes in steps:
        shelf, model = shelves[first], models[first]
        if storing:
            shelf.store(hashes)
            model.update(hashes)
        else:
            shelf.remove(hashes)
            model.difference_update(hashes)
    for shelf, model in zip(shelves, models, strict=True):
        assert sorted(shelf) == sorted(model)
        assert len(shelf) == len(model)
    assert set(table.holders) == models[0] | models[1]
    for shelf in shelves:
        shelf.clear()
    assert len(table) == 0


def test_a_cache_that_turns_over_for_long_keeps_its_logs_short() -> None:
    table = TierTable()
    shelf = RankTierBlocks(table, 1)
    for first in range(0, 100_000, 8):
        shelf.store(range(first, first + 8))
        shelf.remove(range(first - 1_000, first - 992))
    assert len(shelf) == 1_000
    assert sum(map(len, shelf._logs)) < 8 * 1_000


def test_one_block_stored_and_removed_for_ever_keeps_its_log_short() -> None:
    shelf = RankTierBlocks(TierTable(), 1)
    for _ in range(50_000):
        shelf.store([7])
        shelf.remove([7])
    shelf.store([7])
    assert list(shelf) == [7]
    assert sum(map(len, shelf._logs)) < 200


def test_equal_masks_are_one_object() -> None:
    table = TierTable()
    for bit in (1 << 90, 1 << 91):
        RankTierBlocks(table, bit).store(range(1_000))
    assert len({id(mask) for mask in table.holders.values()}) == 1
