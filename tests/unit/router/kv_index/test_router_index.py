"""The block index against a model that walks sets."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.packing import pack_u64
from services.router.kv_index.events import BlockOp, EventBatch, Kind, Snapshot, Tier, decode_ops, encode_ops
from services.router.kv_index.index import BlockIndex, Overlap
from services.router.kv_index.rank_cache import ApplyResult
from services.router.workers.worker import WorkerRank

A, B = WorkerRank("a", 0), WorkerRank("b", 0)


def stored(sequence: int, *hashes: int, tier: Tier = Tier.DEVICE) -> EventBatch:
    return EventBatch(0, sequence, (BlockOp(Kind.STORED, tier, pack_u64(hashes)),))


def removed(sequence: int, *hashes: int, tier: Tier = Tier.DEVICE) -> EventBatch:
    return EventBatch(0, sequence, (BlockOp(Kind.REMOVED, tier, pack_u64(hashes)),))


def index_of(*slots: WorkerRank, capacity: int = 1000) -> BlockIndex:
    index = BlockIndex()
    for slot in slots:
        index.open(slot, 1, capacity)
    return index


def test_longest_prefix_by_rank() -> None:
    index = index_of(A, B)
    index.apply(A, 1, stored(1, 1, 2, 3))
    index.apply(B, 1, stored(1, 1))
    assert index.match([1, 2, 3, 4]) == {A: Overlap(3), B: Overlap(1)}
    assert index.match([9, 1, 2]) == {}
    assert index.match([]) == {}


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
    index.apply(A, 1, EventBatch(0, 3, (BlockOp(Kind.CLEARED, Tier.DEVICE, b""),)))
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
        st.sampled_from(list(Kind)),
        st.sampled_from(list(Tier)),
        st.lists(st.integers(1, 40), max_size=6),
        st.booleans(),
    ),
    max_size=30,
)


@given(operations)
@settings(max_examples=100, deadline=None)
def test_tables_equal_what_the_ranks_hold(ops: list[tuple[Kind, Tier, list[int], bool]]) -> None:
    index = index_of(A, B)
    sequences = {A: 0, B: 0}
    model: dict[WorkerRank, dict[Tier, set[int]]] = {slot: {tier: set() for tier in Tier} for slot in (A, B)}
    for kind, tier, hashes, first in ops:
        slot = A if first else B
        sequences[slot] += 1
        batch = EventBatch(0, sequences[slot], (BlockOp(kind, tier, pack_u64(hashes)),))
        assert index.apply(slot, 1, batch) is ApplyResult.APPLIED
        if kind is Kind.STORED:
            model[slot][tier].update(hashes)
        elif kind is Kind.REMOVED:
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
def test_encoded_operations_come_back(ops: list[tuple[Kind, Tier, list[int], bool]]) -> None:
    batch = tuple(BlockOp(kind, tier, pack_u64(hashes)) for kind, tier, hashes, _ in ops)
    assert decode_ops(encode_ops(batch)) == batch
