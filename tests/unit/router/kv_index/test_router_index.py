"""The block index: events, matching, tiers."""

from __future__ import annotations

import math
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.base.packing import pack_u64
from services.router.state.kv_index.events import (
    BlockOp,
    CacheOperation,
    EventBatch,
    Snapshot,
    Tier,
    decode_ops,
    encode_ops,
)
from services.router.state.kv_index.index import BlockIndex, Overlap
from services.router.state.kv_index.matching import bits_of, depths
from services.router.state.kv_index.rank_cache import ApplyResult
from services.router.state.kv_index.tier import RankTierBlocks, TierTable
from services.router.state.workers.worker import WorkerRank

A, B = WorkerRank("a", 0), WorkerRank("b", 0)


def stored(sequence: int, *hashes: int, tier: Tier = Tier.DEVICE) -> EventBatch:
    return EventBatch(0, sequence, (BlockOp(CacheOperation.STORED, tier, pack_u64(hashes)),))


def removed(sequence: int, *hashes: int, tier: Tier = Tier.DEVICE) -> EventBatch:
    return EventBatch(0, sequence, (BlockOp(CacheOperation.REMOVED, tier, pack_u64(hashes)),))


def index_of(*slots: WorkerRank, capacity: int = 1000) -> BlockIndex:
    index = BlockIndex()
    for slot in slots:
        index.open(slot, 1, capacity)
    return index


def test_duplicates_gaps_and_stale_epochs_change_nothing() -> None:
    index = index_of(A)
    assert index.apply(A, 1, stored(1, 1)) is ApplyResult.APPLIED
    assert index.apply(A, 1, stored(1, 2)) is ApplyResult.DUPLICATE
    assert index.apply(A, 1, stored(3, 3)) is ApplyResult.GAP
    assert index.apply(A, 2, stored(2, 4)) is ApplyResult.STALE
    assert index.apply(B, 1, stored(1, 5)) is ApplyResult.STALE
    assert index.match([1]) == {A: Overlap(1)}
    assert index.blocks(A) == 1
    assert index.apply(A, 1, stored(2, 2)) is ApplyResult.APPLIED


def test_a_new_epoch_starts_empty_and_the_same_one_keeps() -> None:
    index = index_of(A)
    index.apply(A, 1, stored(1, 1, 2))
    index.open(A, 1, 1000)
    assert index.match([1, 2]) == {A: Overlap(2)}
    index.open(A, 2, 1000)
    assert index.match([1, 2]) == {}
    assert index.distinct_blocks == 0
    assert index.apply(A, 2, stored(1, 1)) is ApplyResult.APPLIED


def test_more_blocks_than_the_card_allows_overflow() -> None:
    index = index_of(A, capacity=2)
    assert index.apply(A, 1, stored(1, 1, 2)) is ApplyResult.APPLIED
    assert index.apply(A, 1, stored(2, 1, 2)) is ApplyResult.APPLIED
    assert index.apply(A, 1, stored(3, 3)) is ApplyResult.OVERFLOW
    index.drop(A)
    assert index.distinct_blocks == 0


def test_snapshot_replaces_unless_it_is_older() -> None:
    index = index_of(A, B)
    index.apply(B, 1, stored(1, 1))
    index.apply(A, 1, stored(1, 1, 2))
    assert index.replace(A, 1, Snapshot(0, 5, (pack_u64([1, 7]), b"", b""))) is ApplyResult.APPLIED
    assert index.match([1, 7]) == {A: Overlap(2), B: Overlap(1)}
    assert index.match([1, 2])[A] == Overlap(1)
    assert index.replace(A, 1, Snapshot(0, 4, (b"", b"", b""))) is ApplyResult.DUPLICATE
    assert index.replace(A, 9, Snapshot(0, 9, (b"", b"", b""))) is ApplyResult.STALE
    assert index.apply(A, 1, stored(6, 8)) is ApplyResult.APPLIED


def test_tiers_continue_the_prefix() -> None:
    index = index_of(A)
    index.apply(A, 1, stored(1, 1, 2))
    index.apply(A, 1, stored(2, 2, 3, tier=Tier.HOST))
    index.apply(A, 1, stored(3, 4, 5, tier=Tier.DISK))
    assert index.match([1, 2, 3, 4, 5, 6]) == {A: Overlap(2, 1, 2)}
    assert index.match([3, 4]) == {A: Overlap(0, 1, 1)}


def test_cleared_empties_every_tier() -> None:
    index = index_of(A)
    index.apply(A, 1, stored(1, 1))
    index.apply(A, 1, stored(2, 2, tier=Tier.HOST))
    index.apply(A, 1, EventBatch(0, 3, (BlockOp(CacheOperation.CLEARED, Tier.DEVICE, b""),)))
    assert (index.distinct_blocks, index.blocks(A)) == (0, 0)


def test_bits_are_reused_after_a_rank_is_gone() -> None:
    index = index_of(A)
    for epoch in range(2, 200):
        index.open(A, epoch, 10)
        index.apply(A, epoch, stored(1, 1))
    assert index.match([1]) == {A: Overlap(1)}
    assert max(mask for table in index._tables for mask in table.holders.values()) == 1


@pytest.mark.parametrize("length", [1, 63, 64, 65, 500])
@given(depths=st.lists(st.integers(0, 500), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_matching_finds_every_depth(length: int, depths: list[int]) -> None:
    prompt = list(accumulate(range(length), lambda last, each: (last * 31 + each) % (1 << 64), initial=7))[:length]
    index = BlockIndex()
    expected = {}
    for number, wanted in enumerate(depths):
        slot, depth = WorkerRank(f"w{number}", 0), min(wanted, length)
        index.open(slot, 1, 1000)
        index.apply(slot, 1, stored(1, *prompt[:depth]))
        if depth:
            expected[slot] = Overlap(depth)
    assert index.match(prompt) == expected


operations = st.lists(
    st.tuples(
        st.sampled_from(list(CacheOperation)),
        st.sampled_from(list(Tier)),
        st.lists(st.integers(1, 40), max_size=6),
        st.booleans(),
    ),
    max_size=30,
)


@given(operations)
@settings(max_examples=100, deadline=None)
def test_tables_equal_what_the_ranks_hold(ops: list[tuple[CacheOperation, Tier, list[int], bool]]) -> None:
    index = index_of(A, B)
    sequences = {A: 0, B: 0}
    model: dict[WorkerRank, dict[Tier, set[int]]] = {slot: {tier: set() for tier in Tier} for slot in (A, B)}
    for kind, tier, hashes, first in ops:
        slot = A if first else B
        sequences[slot] += 1
        batch = EventBatch(0, sequences[slot], (BlockOp(kind, tier, pack_u64(hashes)),))
        assert index.apply(slot, 1, batch) is ApplyResult.APPLIED
        if kind is CacheOperation.STORED:
            model[slot][tier].update(hashes)
        elif kind is CacheOperation.REMOVED:
            model[slot][tier].difference_update(hashes)
        else:
            model[slot] = {each: set() for each in Tier}
    for tier in Tier:
        assert set(index._tables[tier].holders) == model[A][tier] | model[B][tier]
    for slot in (A, B):
        holding = index.cache(slot)
        assert holding is not None
        assert [set(held) for held in holding.tiers] == [model[slot][tier] for tier in Tier]
    index.drop(A)
    index.drop(B)
    assert index.distinct_blocks == 0


@given(operations)
def test_encoded_operations_come_back(ops: list[tuple[CacheOperation, Tier, list[int], bool]]) -> None:
    batch = tuple(BlockOp(kind, tier, pack_u64(hashes)) for kind, tier, hashes, _ in ops)
    assert decode_ops(encode_ops(batch)) == batch


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


def test_cache_with_long_turnover_keeps_its_logs_short() -> None:
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
