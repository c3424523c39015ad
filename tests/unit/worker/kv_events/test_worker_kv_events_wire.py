"""The bytes engines publish, as they occur in the wild."""

from __future__ import annotations

from types import NoneType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.contract.cache_events import CacheTier
from services.worker.kv_events.events import EngineCleared, EngineRemoved, EngineStored, MalformedEvents
from services.worker.kv_events.wire import decode

MAPS = bytes.fromhex(
    "83a27473cb3ff8000000000000a66576656e74739388a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920b0cb1"
    "706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f72615f69"
    "64c0a66d656469756da3475055a96c6f72615f6e616d65c083a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573"
    "910ba66d656469756da347505581a474797065b0416c6c426c6f636b73436c6561726564b2646174615f706172616c6c656c5f72616e6b00"
)
ARRAYS = bytes.fromhex(
    "93cb3ff8000000000000939cab426c6f636b53746f726564920b0cc098010203040506070804c0a3475055c0c0c0c0c094ac426c6f636b52"
    "656d6f766564910ba3475055c091b0416c6c426c6f636b73436c656172656400"
)


def encode(*events: object, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


@pytest.mark.parametrize("payload", [MAPS, ARRAYS], ids=["maps", "arrays"])
def test_both_encodings_decode_to_the_same_events(payload: bytes) -> None:
    batch = decode(payload)
    assert (batch.time, batch.rank) == (1.5, 0)
    stored, removed, cleared = batch.events
    assert isinstance(stored, EngineStored)
    assert (list(stored.hashes), stored.parent, stored.token_ids.tolist()) == ([11, 12], None, list(range(1, 9)))
    assert (stored.block_size, stored.tier, stored.lora, stored.salt) == (4, CacheTier.DEVICE, "", "")
    assert stored.opaque_from is None
    assert removed == EngineRemoved([11], CacheTier.DEVICE)
    assert cleared == EngineCleared()


def test_signed_hashes_are_the_same_as_unsigned_ones() -> None:
    signed = {"type": "BlockRemoved", "block_hashes": [-1, -(2**63)]}
    (removed,) = decode(encode(signed)).events
    assert removed == EngineRemoved([2**64 - 1, 2**63])


def stored_map(**fields: object) -> dict[str, object]:
    return {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": [1, 2, 3, 4], "block_size": 2, **fields}


@pytest.mark.parametrize(
    ("fields", "lora", "salt", "opaque_from"),
    [
        ({}, "", "", None),
        ({"lora_name": "tone", "extra_keys": [["tone"], ["tone"]]}, "tone", "", None),
        ({"extra_keys": [["tenant"], None]}, "", "tenant", None),
        ({"lora_name": "tone", "extra_keys": [["tone", "tenant"], ["tone"]]}, "tone", "tenant", None),
        ({"extra_keys": [None, [["image-1", 3]]]}, "", "", 1),
        ({"extra_keys": [["tenant", b"digest"], None]}, "", "", 0),
        ({"lora_id": 3}, "lora-3", "", None),
        ({"lora_id": 3, "lora_name": None, "extra_keys": [None, None]}, "lora-3", "", None),
        ({"lora_id": 117, "lora_name": None, "extra_keys": [["a"], ["a"]]}, "a", "", None),
        ({"lora_id": 117, "lora_name": None, "extra_keys": [["a", "tenant"], ["a"]]}, "a", "tenant", None),
        ({"lora_id": 117, "lora_name": None, "extra_keys": [[117], [117]]}, "lora-117", "", 0),
        ({"lora_name": "tone\x1f7", "extra_keys": [["tone\x1f7", "tenant"], ["tone\x1f7"]]}, "tone", "tenant", None),
        ({"cache_salt": "tenant"}, "", "tenant", None),
        ({"lookahead_token_ids": [[1], [2]]}, "", "", 0),
    ],
)
def test_what_else_went_into_the_hashes(
    fields: dict[str, object], lora: str, salt: str, opaque_from: int | None
) -> None:
    (stored,) = decode(encode(stored_map(**fields))).events
    assert isinstance(stored, EngineStored)
    assert (stored.lora, stored.salt, stored.opaque_from) == (lora, salt, opaque_from)


@pytest.mark.parametrize(("place", "opaque_from"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_blocks_from_an_image_of_sglang_on_are_opaque(place: int, opaque_from: int) -> None:
    token_ids = [1, 2, 3, 4]
    token_ids[place] = 1_000_000 + (1 << 62)  # derived from the pixels
    (stored,) = decode(encode(stored_map(token_ids=token_ids))).events
    assert isinstance(stored, EngineStored)
    assert stored.opaque_from == opaque_from
    assert stored.token_ids.tolist() == [*token_ids[:place], 0, *token_ids[place + 1 :]]


def test_pairs_instead_of_ids_are_opaque() -> None:
    (stored,) = decode(encode(stored_map(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]))).events
    assert isinstance(stored, EngineStored)
    assert stored.opaque_from == 0


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        ("GPU", CacheTier.DEVICE),
        (None, CacheTier.DEVICE),
        ("CPU", CacheTier.HOST),
        ("CPU_PINNED", CacheTier.HOST),
        ("DISK", CacheTier.DISK),
        ("STORAGE", CacheTier.DISK),
    ],
)
def test_media_are_tiers(medium: str | None, tier: CacheTier) -> None:
    assert decode(encode({"type": "BlockRemoved", "block_hashes": [1], "medium": medium})).events == [
        EngineRemoved([1], tier)
    ]


def test_events_of_remote_caches_and_unknown_kinds_are_omitted() -> None:
    remote = {"type": "BlockRemoved", "block_hashes": [1], "locality": "REMOTE"}
    assert decode(encode(remote, {"type": "SomethingNew", "x": 1}, ["SomethingNew", 4])).events == []


def test_bytes_as_hashes_stay_bytes() -> None:
    assert decode(encode(["BlockRemoved", [b"0123"], "GPU"])).events == [EngineRemoved([b"0123"])]


SIMPLE = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
)
VALUES = st.recursive(
    SIMPLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["block_hashes", "token_ids", "block_size", "parent_block_hash", "medium", "extra_keys", "lora_name", "group_idx"]
)


@given(st.binary(max_size=64) | st.builds(lambda fields: encode(stored_map(**fields)), st.dictionaries(FIELDS, VALUES)))
def test_decoding_an_invalid_batch_raises_malformed_events_for_an_expected_reason(payload: bytes) -> None:
    cause: BaseException | None = None
    try:
        for event in decode(payload).events:
            assert isinstance(event, (EngineStored, EngineRemoved, EngineCleared))
            assert all(isinstance(each, bytes) or 0 <= each < 2**64 for each in getattr(event, "hashes", []))
    except MalformedEvents as error:
        cause = error.__cause__  # `decode` wraps every exception: one that points to a bug must not hide there
    assert isinstance(cause, (NoneType, msgspec.MsgspecError, LookupError, TypeError, ValueError, ArithmeticError))


HASHES = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=3, unique=True)


@given(HASHES, st.none() | st.integers(0, 2**64 - 1), st.integers(1, 4), st.sampled_from(["GPU", "CPU", "DISK"]))
def test_maps_and_arrays_of_a_stored_event_decode_to_the_same_fields(
    hashes: list[int], parent: int | None, block_size: int, medium: str
) -> None:
    tokens = list(range(len(hashes) * block_size))
    values = (hashes, parent, tokens, block_size, None, medium)
    fields = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    named = {"type": "BlockStored", **dict(zip(fields, values, strict=True))}
    tier = {"GPU": CacheTier.DEVICE, "CPU": CacheTier.HOST, "DISK": CacheTier.DISK}[medium]
    for encoded in (named, ["BlockStored", *values]):
        (stored,) = decode(encode(encoded)).events
        assert isinstance(stored, EngineStored)
        assert (list(stored.hashes), stored.parent, stored.token_ids.tolist()) == (hashes, parent, tokens)
        assert (stored.block_size, stored.tier) == (block_size, tier)


@pytest.mark.parametrize(
    "payload",
    [
        msgspec.msgpack.encode([1.5, [{"type": "BlockStored"}], 0]),
        msgspec.msgpack.encode([1.5, [{"type": "BlockRemoved", "block_hashes": ["text"]}], 0]),
        msgspec.msgpack.encode([1.5, [["BlockStored", [1], None, [-1], 1]], 0]),
        msgspec.msgpack.encode([1.5, 7, 0]),
        msgspec.msgpack.encode("batch"),
        b"",
    ],
)
def test_broken_batches_are_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedEvents):
        decode(payload)
