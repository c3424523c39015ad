"""KV events of prompts with media items: the hashes of all services, or none."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.types.hashing import block_hashes
from services.common.types.media.spans import MediaKind, MediaSpan, content_hash
from services.worker.kv_events.events import EngineRemoved, EngineStored
from services.worker.kv_events.groups import GroupTranslator
from services.worker.kv_events.wire import decode, read_extra_keys

A, B = content_hash(b"a"), content_hash(b"b")
IDENTIFIERS = (A, B, content_hash(b"c"))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[MediaSpan]]:
    """Token ids, and media items in order that do not overlap."""
    spans, at = [], 0
    for _ in range(draw(st.integers(0, 4))):
        offset = at + draw(st.integers(0, 9))
        length = draw(st.integers(1, 20))
        spans.append(MediaSpan(MediaKind.IMAGE, draw(st.sampled_from(IDENTIFIERS)), offset, length))
        at = offset + length
    return list(range(at + draw(st.integers(0, 12)))), spans


def event(tokens: Sequence[int], spans: Sequence[MediaSpan], size: int, first: int, last: int) -> EngineStored:
    """The engine blocks `first` to before `last` as vLLM reports them."""
    media = [
        [
            (span.hash, span.offset - block * size)
            for span in spans
            if span.offset < (block + 1) * size and span.end > block * size
        ]
        for block in range(first, last)
    ]
    ids = array("I", tokens[first * size : last * size])
    hashes = [1_000 + block for block in range(first, last)]
    return EngineStored(hashes, 999 + first if first else None, ids, size, media=media if any(media) else ())


@settings(max_examples=300)
@given(prompts(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 5))
def test_engine_blocks_no_larger_than_ours_give_the_hashes_of_all_services(
    prompt: tuple[list[int], list[MediaSpan]], size: int, together: int
) -> None:
    tokens, spans = prompt
    translator = GroupTranslator(8, counts_copies=True)
    whole = len(tokens) // size
    for first in range(0, whole, together):
        translator.apply([event(tokens, spans, size, first, min(first + together, whole))])
    expected = block_hashes(tokens, 8, media=spans)
    assert translator.holds(expected)
    assert translator.held() == len(set(expected))
    translator.apply([EngineRemoved([1_000 + block for block in range(whole)])])
    assert translator.held() == 0


@settings(max_examples=300)
@given(prompts(), st.sampled_from([8, 16, 32]))
def test_larger_engine_blocks_give_a_prefix_of_the_hashes_and_never_a_wrong_one(
    prompt: tuple[list[int], list[MediaSpan]], size: int
) -> None:
    tokens, spans = prompt
    translator = GroupTranslator(4, counts_copies=True)
    whole = len(tokens) // size
    translator.apply([event(tokens, spans, size, 0, whole)])
    expected = block_hashes(tokens[: whole * size], 4, media=spans)
    held = translator.held()
    assert translator.holds(expected[:held])
    if spans:
        assert held >= min(spans[0].offset // 4 + 1, len(expected))  # all before the end of the first item is known
    else:
        assert held == len(expected)


def test_an_item_known_to_lie_in_one_block_leaves_later_ones_known() -> None:
    tokens, spans = list(range(32)), [MediaSpan(MediaKind.IMAGE, A, 13, 3)]
    translator = GroupTranslator(8, counts_copies=True)
    translator.apply([event(tokens, spans, 16, 0, 2)])
    assert translator.holds(block_hashes(tokens, 8, media=spans))


@pytest.mark.parametrize("offset", [8, 99, -1])
def test_an_item_outside_its_block_makes_the_block_opaque(offset: int) -> None:
    translator = GroupTranslator(8, counts_copies=True)
    translator.apply([EngineStored([1, 2], None, array("I", range(16)), 8, media=[[(A, offset)], []])])
    assert translator.held() == 0


def test_two_items_that_begin_at_one_token_make_the_block_opaque() -> None:
    translator = GroupTranslator(8, counts_copies=True)
    translator.apply([EngineStored([1], None, array("I", range(8)), 8, media=[[(A, 2), (B, 2)]])])
    assert translator.held() == 0


def test_extra_keys_with_identifiers_are_read_as_items() -> None:
    keys = [[[A.hex(), 9], [B.hex(), 27], "tenant"], [[B.hex(), -5]], None]
    raw = {"type": "BlockStored", "block_hashes": [1, 2, 3], "token_ids": list(range(96)), "block_size": 32}
    (stored,) = decode(msgspec.msgpack.encode({"ts": 1.0, "events": [{**raw, "extra_keys": keys}]})).events
    assert isinstance(stored, EngineStored)
    assert stored.media == [[(A, 9), (B, 27)], [(B, -5)], []]
    assert (stored.salt, stored.opaque_from) == ("tenant", None)


@pytest.mark.parametrize("key", [["image-1", 3], [A.hex() + A.hex(), 3], ["x" * 32, 3], [A.hex(), "3"], [A.hex()]])
def test_extra_keys_with_another_identifier_are_opaque(key: list[object]) -> None:
    raw = {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": list(range(8)), "block_size": 4}
    (stored,) = decode(msgspec.msgpack.encode({"ts": 1.0, "events": [{**raw, "extra_keys": [None, [key]]}]})).events
    assert isinstance(stored, EngineStored)
    assert (stored.opaque_from, stored.media) == (1, ())


def test_items_of_an_engine_that_cannot_name_them_are_opaque() -> None:
    assert read_extra_keys([["tenant"], [[A.hex(), 1]], None], "") == ("tenant", 1)
