"""Block hashes and packed integers."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.base import packing
from services.common.base.packing import pack_u32, pack_u64, unpack_u32, unpack_u64
from services.common.types.hashing import SEGMENT, PrefixHashes, block_hashes, chain, local_hash, seed_for

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=60)


def test_known_answers_of_a_sequence() -> None:
    assert list(block_hashes(range(1, 13), 4)) == [
        14643705804678351452,
        4945711292740353085,
        12583592247330656132,
    ]


def test_known_answers_of_single_blocks() -> None:
    assert local_hash(pack_u32([5, 6, 7, 8])) == 16777012769546811212
    assert local_hash(pack_u32([9, 10, 11, 12])) == 483935686894639516


@pytest.mark.parametrize(
    ("lora", "salt", "seed", "first"),
    [
        ("", "", 1337, 14643705804678351452),
        ("my-lora", "", 12827409268353072861, 15671544057904749233),
        ("", "tenant-a", 1948188790972764086, 5738685477468498325),
        ("my-lora", "tenant-a", 14775598059325835610, 6157910915076630503),
    ],
)
def test_known_answers_of_key_spaces(lora: str, salt: str, seed: int, first: int) -> None:
    assert seed_for(lora, salt) == seed
    assert list(block_hashes([1, 2, 3, 4], 4, lora, salt)) == [first]


def test_partial_block_has_no_hash() -> None:
    assert list(block_hashes([1, 2, 3], 4)) == []
    assert len(block_hashes([1, 2, 3, 4, 5], 4)) == 1
    assert list(block_hashes([], 4)) == []


@pytest.mark.parametrize("size", [0, -1])
def test_block_without_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="block_size"):
        block_hashes([1], size)


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_hashes_agree_exactly_on_the_common_prefix(left: list[int], right: list[int], size: int) -> None:
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    ours, theirs = block_hashes(left, size), block_hashes(right, size)
    agree = [a == b for a, b in zip(ours, theirs, strict=False)]
    assert agree == [(index + 1) * size <= shared for index in range(len(agree))]


@given(TOKENS, st.integers(1, 8), st.integers(0, 10))
def test_continuing_from_a_parent_is_the_same_as_hashing_at_once(tokens: list[int], size: int, blocks: int) -> None:
    cut = min(blocks, len(tokens) // size)
    whole = list(block_hashes(tokens, size))
    head = list(block_hashes(tokens[: cut * size], size))
    tail = list(block_hashes(tokens[cut * size :], size, parent=head[-1] if head else None))
    assert head + tail == whole


@given(TOKENS, st.integers(1, 8), st.text(max_size=5), st.text(max_size=5))
def test_definition_step_by_step(tokens: list[int], size: int, lora: str, salt: str) -> None:
    seed = seed_for(lora, salt)
    parent, expected = None, []
    for start in range(0, len(tokens) // size * size, size):
        parent = chain(parent, local_hash(pack_u32(tokens[start : start + size]), seed), seed)
        expected.append(parent)
    assert list(block_hashes(tokens, size, lora, salt)) == expected
    assert block_hashes(pack_u32(tokens), size, lora, salt) == block_hashes(tokens, size, lora, salt)


def test_bytes_on_the_wire_of_a_big_endian_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_SWAP", True)
    values = array("I", [1, 2])
    assert pack_u32(values) == bytes([0, 0, 0, 1, 0, 0, 0, 2])  # this machine's order, swapped
    assert list(values) == [1, 2]
    assert list(unpack_u32(pack_u32(values))) == [1, 2]


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_u32_round_trip(values: list[int]) -> None:
    assert list(unpack_u32(pack_u32(values))) == values
    assert pack_u32(iter(values)) == pack_u32(array("I", values)) == pack_u32(array("Q", values))


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_u64_round_trip(values: list[int]) -> None:
    assert list(unpack_u64(pack_u64(values))) == values


@pytest.mark.parametrize("value", [-1, 2**32])
def test_ids_out_of_range_do_not_wrap(value: int) -> None:
    with pytest.raises(OverflowError):
        pack_u32([value])


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 3), st.sampled_from(["", "a"]))
def test_remembered_prefixes_give_the_same_hashes(segments: list[int], size: int, salt: str) -> None:
    """Prompts that share segments, in an order of which most are remembered and some are dropped."""
    hashes = PrefixHashes(most=3)
    tokens = [number % 7 + token for number in segments for token in range(SEGMENT * size)][: -size or None]
    for _ in range(2):
        for end in (len(tokens), len(tokens) // 2, len(tokens)):
            ids = pack_u32(tokens[:end])
            assert hashes.of(ids, size, cache_salt=salt) == block_hashes(ids, size, cache_salt=salt)


def test_remembered_segments_are_bounded() -> None:
    hashes = PrefixHashes(most=3)
    for number in range(10):
        hashes.of(pack_u32([number] * SEGMENT), 1)
    assert len(hashes) == 3
