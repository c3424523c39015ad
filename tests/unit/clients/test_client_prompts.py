"""Packing and hashing of the client library: the same bytes and names as in the services."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_client import block_hashes, pack_u32, pack_u64, prompts, unpack_u32, unpack_u64
from sluice_client.wire import PromptRef

from services.common.base import packing
from services.common.types import hashing
from services.common.types.media.spans import MediaKind, MediaSpan, content_hash

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_known_answers() -> None:
    assert list(block_hashes(range(1, 13), 4)) == [
        14643705804678351452,
        4945711292740353085,
        12583592247330656132,
    ]


@pytest.mark.parametrize(
    ("lora", "cache_salt", "expected"),
    [
        ("my-lora", "", 15671544057904749233),
        ("", "tenant-a", 5738685477468498325),
        ("my-lora", "tenant-a", 6157910915076630503),
        ("", "", 14643705804678351452),
    ],
)
def test_adapters_and_salts_change_the_hashes(lora: str, cache_salt: str, expected: int) -> None:
    assert list(block_hashes([1, 2, 3, 4], 4, lora, cache_salt)) == [expected]


@given(ids=IDS, block_size=st.integers(1, 9), lora=st.text(max_size=3), salt=st.text(max_size=3))
def test_names_are_those_of_the_services(ids: list[int], block_size: int, lora: str, salt: str) -> None:
    expected = hashing.block_hashes(ids, block_size, lora, salt)
    assert block_hashes(ids, block_size, lora, salt) == expected
    assert block_hashes(pack_u32(ids), block_size, lora, salt) == expected


@given(
    st.integers(0, 60),
    st.integers(1, 9),
    st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 9), st.integers(1, 20)), max_size=4),
)
def test_names_of_prompts_with_media_are_those_of_the_services(
    length: int, block_size: int, items: list[tuple[bytes, int, int]]
) -> None:
    spans, at = [], 0
    for content, gap, tokens in items:
        spans.append(MediaSpan(MediaKind.IMAGE, content_hash(content), at + gap, tokens))
        at += gap + tokens
    given_media = [(span.hash, span.offset, span.length) for span in spans]
    expected = hashing.block_hashes(range(length), block_size, media=spans)
    assert block_hashes(range(length), block_size, media=given_media) == expected


@given(ids=IDS, hashes=st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_packed_integers_are_those_of_the_services(ids: list[int], hashes: list[int]) -> None:
    assert pack_u32(ids) == packing.pack_u32(ids)
    assert pack_u64(hashes) == packing.pack_u64(hashes)
    assert list(unpack_u32(pack_u32(ids))) == ids
    assert list(unpack_u64(pack_u64(hashes))) == hashes


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_u32([2**32])
    with pytest.raises(OverflowError):
        pack_u64([-1])
    with pytest.raises(ValueError, match="multiple"):
        unpack_u32(b"12345")
    with pytest.raises(ValueError, match="5 bytes"):
        prompts.by_tokens(b"12345")


def test_a_prompt_is_ids_or_something_prepared() -> None:
    ids = [7, 8, 9]
    assert prompts.prompt_ref(ids) == PromptRef(token_ids=pack_u32(ids))
    assert prompts.prompt_ref(pack_u32(ids)) == PromptRef(token_ids=pack_u32(ids))
    assert prompts.prompt_ref(array("I", ids)) == PromptRef(token_ids=pack_u32(ids))
    prepared = prompts.by_length(12)
    assert prompts.prompt_ref(prepared) is prepared


def test_a_prompt_hashed_here_keeps_its_length() -> None:
    ids = list(range(11))
    assert prompts.hashed_here(ids, 4, "l", "s") == PromptRef(
        block_hashes=pack_u64(hashing.block_hashes(ids, 4, "l", "s")),
        hash_scheme=hashing.HASH_SCHEME,
        block_size=4,
        prompt_tokens=11,
    )
