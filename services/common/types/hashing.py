"""Block hashes: the names of KV-cache blocks, identical in all services.

Scheme "sluice-xxh3-v1": the local hash of a full block is xxh3-64 with seed 1337 over its little-endian uint32 token
ids; the hash of the first block is its local hash, and of each next one xxh3-64 over parent ‖ local (little-endian
uint64 each). A LoRA name and a cache salt shift the seed, so their blocks never match others. The hash of a media item
is appended to the ids of every block that contains some of its placeholder tokens, in the order of the items, so that
prompts with other items never match. Partial blocks have no hash.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from struct import Struct, iter_unpack

from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from services.common.base.packing import pack_u32
from services.common.types.media.spans import MediaSpan

HASH_SCHEME = "sluice-xxh3-v1"
BASE_SEED = 1337
SEGMENT = 64
"""Blocks that `PrefixHashes` remembers together."""
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
    seed = seed_for(lora, cache_salt)
    blocks = _whole_blocks(token_ids, block_size)
    if media:
        return _chain_with_media(blocks, block_size, seed, parent, media)
    return _chain_of(blocks, block_size * 4, seed, parent)


def _whole_blocks(token_ids: Sequence[int] | bytes, block_size: int) -> memoryview:
    if block_size < 1:
        raise ValueError("block_size must be at least 1")
    packed = token_ids if isinstance(token_ids, bytes) else pack_u32(token_ids)
    stride = block_size * 4
    return memoryview(packed)[: len(packed) // stride * stride]


def _chain_of(blocks: memoryview, stride: int, seed: int, parent: int | None) -> array[int]:
    hashes = array("Q")
    append = hashes.append
    digest, pair = xxh3_64_intdigest, _PAIR
    for (block,) in iter_unpack(f"{stride}s", blocks):
        local = digest(block, seed)
        parent = local if parent is None else digest(pair(parent, local), seed)
        append(parent)
    return hashes


def _chain_with_media(
    blocks: memoryview, block_size: int, seed: int, parent: int | None, media: Sequence[MediaSpan]
) -> array[int]:
    hashes = array("Q")
    stride = block_size * 4
    items = media_of_blocks(media, block_size, len(blocks) // stride)
    for index, (block,) in enumerate(iter_unpack(f"{stride}s", blocks)):
        parent = chain(parent, local_hash(block, seed, items.get(index, ())), seed)
        hashes.append(parent)
    return hashes


def media_of_blocks(media: Sequence[MediaSpan], block_size: int, blocks: int) -> dict[int, list[bytes]]:
    """Returns the hashes of the items that each of the first `blocks` blocks contains tokens of, by index of block."""
    items: dict[int, list[bytes]] = {}
    for span in media:
        if span.length:
            for index in range(max(span.offset, 0) // block_size, min((span.end - 1) // block_size + 1, blocks)):
                items.setdefault(index, []).append(span.hash)
    return items


class PrefixHashes:
    """Computes block hashes, and remembers those of segments of prompts: a known prefix costs a tenth.

    A segment is known by its parent, its seed and a digest of 128 bits, which is more than its hashes have. Threads may
    share one.

    Args:
        most: segments remembered; those used longest ago are dropped.
    """

    def __init__(self, most: int = 8_192) -> None:
        self._most = most
        self._known: OrderedDict[tuple[int | None, int, int, int], array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def of(
        self,
        token_ids: Sequence[int] | bytes,
        block_size: int,
        lora: str = "",
        cache_salt: str = "",
        media: Sequence[MediaSpan] = (),
    ) -> array[int]:
        """Returns the same as `block_hashes`; prompts with media items are not remembered."""
        if media:
            return block_hashes(token_ids, block_size, lora, cache_salt, media=media)
        seed, stride = seed_for(lora, cache_salt), block_size * 4
        blocks = _whole_blocks(token_ids, block_size)
        size, known = stride * SEGMENT, self._known
        whole = len(blocks) // size * size
        hashes, parent = array("Q"), None
        for start in range(0, whole, size):
            segment = blocks[start : start + size]
            key = (parent, seed, stride, xxh3_128_intdigest(segment))
            found = known.get(key)
            if found is None:
                found = known[key] = _chain_of(segment, stride, seed, parent)
                if len(known) > self._most:
                    self._drop_oldest()
            else:
                self._touch(key)
            hashes.extend(found)
            parent = found[-1]
        hashes.extend(_chain_of(blocks[whole:], stride, seed, parent))
        return hashes

    def _touch(self, key: tuple[int | None, int, int, int]) -> None:
        with suppress(KeyError):  # another thread has just dropped it
            self._known.move_to_end(key)

    def _drop_oldest(self) -> None:
        with suppress(KeyError):
            self._known.popitem(last=False)
