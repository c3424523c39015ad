"""Decodes the msgpack events of vLLM and SGLang: tagged maps or positional arrays, signed or unsigned hashes."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.types.media.spans import HASH_BYTES
from services.worker.kv_events.events import (
    BlockItem,
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
    MalformedEvents,
    plain_hash,
    tier_of,
)

LOAD_MARK = "\x1f"
"""What separates the name of an adapter from the number of its load, in the engine's name of a repeated load."""

_MAX_TOKEN_ID = 0xFFFF_FFFF
"""Token id of an engine's KV event; from a larger one on, the blocks of the event have no name."""
_BATCH_FIELDS = ("ts", "events", "data_parallel_rank")
_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def decode(payload: bytes) -> EngineBatch:
    """Decodes one batch; events of unknown kinds and of remote caches are omitted.

    Raises:
        MalformedEvents: the bytes are not a batch.
    """
    import msgspec

    try:
        batch = _named(msgspec.msgpack.decode(payload), _BATCH_FIELDS)
        events = [event for raw in batch["events"] if (event := _event(raw)) is not None]
        rank = batch.get("data_parallel_rank")
        return EngineBatch(events, float(batch.get("ts") or 0.0), None if rank is None else int(rank))
    except MalformedEvents:
        raise
    except Exception as error:  # untrusted bytes may raise any exception in the decoder
        raise MalformedEvents(f"a batch of KV events cannot be decoded: {error}") from error


def _named(raw: object, fields: Sequence[str]) -> Mapping[str, Any]:
    """Returns a map unchanged and names the positions of an array; extra positions of newer engines are dropped."""
    if isinstance(raw, Mapping):
        return raw
    if isinstance(raw, list):
        return dict(zip(fields, raw, strict=False))
    raise MalformedEvents(f"expected a map or an array, found {type(raw).__name__}")


def _event(raw: object) -> EngineEvent | None:
    if isinstance(raw, list) and raw:
        tag, fields = str(raw[0]), _named(raw[1:], _FIELDS.get(str(raw[0]), ()))
    else:
        fields = _named(raw, ())
        tag = str(fields.get("type"))
    if fields.get("locality") == "REMOTE":
        return None
    if tag == "BlockStored":
        return _stored(fields)
    if tag == "BlockRemoved":
        return EngineRemoved(_hashes(fields["block_hashes"]), tier_of(fields.get("medium")), _group(fields))
    if tag == "AllBlocksCleared":
        return EngineCleared()
    return None


def _stored(fields: Mapping[str, Any]) -> EngineStored:
    hashes = _hashes(fields["block_hashes"])
    parent = fields.get("parent_block_hash")
    lora = _lora(fields)
    token_ids, unnamed_from = _token_ids(fields.get("token_ids") or ())
    salt, opaque_from, media = read_block_keys(fields.get("extra_keys") or (), lora)
    if unnamed_from is not None:
        first = unnamed_from // max(int(fields.get("block_size") or 0), 1)
        opaque_from = first if opaque_from is None else min(opaque_from, first)
    if fields.get("lookahead_token_ids"):
        opaque_from = 0
    # SGLang has a field, None for blocks without salt; vLLM puts the salt among the extra keys of the first block.
    salt = str(fields.get("cache_salt") or salt)
    return EngineStored(
        hashes=hashes,
        parent=None if parent is None else plain_hash(parent),
        token_ids=token_ids,
        block_size=int(fields.get("block_size") or 0),
        tier=tier_of(fields.get("medium")),
        lora=lora.partition(LOAD_MARK)[0],
        salt=salt,
        opaque_from=opaque_from,
        media=media,
        group=_group(fields),
        kind=fields.get("kv_cache_spec_kind") or "",
    )


def _lora(fields: Mapping[str, Any]) -> str:
    """Returns the engine's name of the adapter; empty for none."""
    name = fields.get("lora_name") or ""
    if not isinstance(name, str):
        raise TypeError(f"lora_name is {type(name).__name__}")
    if name or fields.get("lora_id") is None:
        return name
    # Older vLLM gives the name only as the first of the keys of each block. Without a name the hashes must differ from
    # those of the base model all the same.
    keys = next((keys for keys in fields.get("extra_keys") or () if keys), None)
    return keys[0] if keys and isinstance(keys[0], str) else f"lora-{fields['lora_id']}"


def read_extra_keys(extra_keys: Sequence[Sequence[object] | None], lora: str) -> tuple[str, int | None]:
    """Reads the additional inputs of block hashes, for engines whose media items cannot be named.

    Returns:
        The salt, and the index of the first block with more than adapter and salt; None if there is no such block.
    """
    salt, opaque_from, media = read_block_keys(extra_keys, lora)
    return salt, next((index for index, items in enumerate(media) if items), opaque_from)


def read_block_keys(
    extra_keys: Sequence[Sequence[object] | None], lora: str
) -> tuple[str, int | None, Sequence[Sequence[BlockItem]]]:
    """Reads the additional inputs of block hashes.

    Returns:
        The salt; the index of the first block with more than adapter, salt and media items of this suite, None if there
        is no such block; and the items of each block, empty if no block has any.
    """
    salt = ""
    media: list[list[BlockItem]] = []
    for index, keys in enumerate(extra_keys):
        texts = [key for key in keys or () if isinstance(key, str)]
        items = [item for key in keys or () if (item := _item(key)) is not None]
        if len(texts) + len(items) != len(keys or ()):
            return salt, index, _if_any(media)
        media.append(items)
        if lora and texts and texts[0] == lora:
            texts = texts[1:]
        if len(texts) > 1:
            return salt, index, _if_any(media)
        salt = salt or (texts[0] if texts else "")
    return salt, None, _if_any(media)


def _item(key: object) -> BlockItem | None:
    """Returns the media item of a pair of identifier and offset; None for anything else.

    An identifier that is not a content hash was not chosen by this suite, so no other service can compute it.
    """
    if not isinstance(key, list | tuple) or len(key) != 2:
        return None
    identifier, offset = key
    if not isinstance(identifier, str) or len(identifier) != 2 * HASH_BYTES or not isinstance(offset, int):
        return None
    try:
        content = bytes.fromhex(identifier)
    except ValueError:
        return None
    return (content, offset) if len(content) == HASH_BYTES else None


def _if_any(media: list[list[BlockItem]]) -> Sequence[Sequence[BlockItem]]:
    return media if any(media) else ()


def _hashes(raw: Sequence[object]) -> list[EngineHash]:
    return [plain_hash(value) for value in raw]


def _token_ids(raw: Sequence[Any]) -> tuple[array[int], int | None]:
    """Returns the ids, and the index of the first one that is not a token; None if all are.

    The caches of some speculative decoders have pairs of ids. SGLang puts numbers of up to 63 bits in place of an
    image's placeholder tokens, which it derives from the image's pixels; they become 0.
    """
    if raw and not isinstance(raw[0], int):
        return array("I"), 0
    try:
        return array("I", raw), None
    except OverflowError:
        names = [token_id <= _MAX_TOKEN_ID for token_id in raw]
        plain = array("I", (token_id if named else 0 for token_id, named in zip(raw, names, strict=True)))
        return plain, names.index(False)


def _group(fields: Mapping[str, Any]) -> int | None:
    group = fields.get("group_idx")
    return None if group is None else int(group)
