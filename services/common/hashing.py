"""Block hashes: the names of KV-cache blocks, identical in all services.

Scheme "sluice-xxh3-v1": the local hash of a full block is xxh3-64 with seed 1337 over its little-endian uint32 token
ids; the hash of the first block is its local hash, and of each next one xxh3-64 over parent ‖ local (little-endian
uint64 each). A LoRA name and a cache salt shift the seed, so their blocks never match others. The hash of a media item
is appended to the ids of every block that contains some of its placeholder tokens, in the order of the items, so that
prompts with other items never match. Partial blocks have no hash.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct, iter_unpack

from xxhash import xxh3_64_intdigest

from services.common.media.spans import MediaSpan
from services.common.packing import pack_u32

HASH_SCHEME = "sluice-xxh3-v1"
BASE_SEED = 1337
_U64 = (1 << 64) - 1
_PAIR = Struct("<QQ").pack


def seed_for(lora: str = "", cache_salt: str = "") -> int:
    """Returns the seed of a key space; empty strings mean no adapter and no salt."""
    seed = BASE_SEED
    if lora:
        seed += xxh3_64_intdigest(lora.encode(), 0)
    if cache_salt:
        seed += xxh3_64_intdigest(cache_salt.encode(), 1)
    return seed & _U64


def local_hash(block: bytes, seed: int = BASE_SEED, media: Sequence[bytes] = ()) -> int:
    """Returns the hash of one full block's packed uint32 ids, independent of its position.

    Args:
        media: hashes of the media items that the block contains tokens of, in order.
    """
    return xxh3_64_intdigest(b"".join((block, *media)), seed)


def chain(parent: int | None, local: int, seed: int = BASE_SEED) -> int:
    """Returns the hash of a block after `parent`, or of the first block when that is None."""
    return local if parent is None else xxh3_64_intdigest(_PAIR(parent, local), seed)


def block_hashes(
    token_ids: Sequence[int] | bytes,
    block_size: int,
    lora: str = "",
    cache_salt: str = "",
    parent: int | None = None,
    media: Sequence[MediaSpan] = (),
) -> array[int]:
    """Returns the chained hashes of all full blocks of a token sequence.

    Args:
        token_ids: the ids, or the same ids as packed uint32.
        block_size: tokens per block, at least 1.
        lora: adapter name; empty for the base model.
        cache_salt: tenant salt; empty for none.
        parent: hash of the block before the first token; None at the start of a sequence.
        media: the media items of the sequence, by offset, which counts from the first of the ids.

    Returns:
        array("Q") with len(token_ids) // block_size hashes.
    """
    if block_size < 1:
        raise ValueError("block_size must be at least 1")
    seed = seed_for(lora, cache_salt)
    packed = token_ids if isinstance(token_ids, bytes) else pack_u32(token_ids)
    stride = block_size * 4
    whole = memoryview(packed)[: len(packed) // stride * stride]
    hashes = array("Q")
    append = hashes.append
    digest, pair = xxh3_64_intdigest, _PAIR
    if media:
        items = media_of_blocks(media, block_size, len(whole) // stride)
        for index, (block,) in enumerate(iter_unpack(f"{stride}s", whole)):
            local = local_hash(block, seed, items.get(index, ()))
            parent = chain(parent, local, seed)
            append(parent)
        return hashes
    for (block,) in iter_unpack(f"{stride}s", whole):
        local = digest(block, seed)
        parent = local if parent is None else digest(pair(parent, local), seed)
        append(parent)
    return hashes


def media_of_blocks(media: Sequence[MediaSpan], block_size: int, blocks: int) -> dict[int, list[bytes]]:
    """Returns the hashes of the items that each of the first `blocks` blocks contains tokens of, by index of block."""
    items: dict[int, list[bytes]] = {}
    for span in media:
        if span.length:
            for index in range(max(span.offset, 0) // block_size, min((span.end - 1) // block_size + 1, blocks)):
                items.setdefault(index, []).append(span.hash)
    return items
