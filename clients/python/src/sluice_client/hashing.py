"""Block hashes, which identify KV-cache blocks, computed as in Sluice's services (scheme "sluice-xxh3-v1").

A full block's local hash is xxh3-64, seed 1337, of its little-endian uint32 token ids. The first block is identified by
its local hash, each next one by the hash of parent ‖ local (little-endian uint64 each). A LoRA name and a cache salt
shift the seed, so that their blocks never match others. The ids of a block are followed by the content hashes of the
media items that have tokens in it. A partial block has no hash.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from struct import Struct

from xxhash import xxh3_64_intdigest

from sluice_client.packing import TokenIds, packed_ids

HASH_SCHEME = "sluice-xxh3-v1"
_BASE_SEED = 1337
_U64 = (1 << 64) - 1
_PAIR = Struct("<QQ").pack


def _seed(lora: str, cache_salt: str) -> int:
    seed = _BASE_SEED
    if lora:
        seed += xxh3_64_intdigest(lora.encode(), 0)
    if cache_salt:
        seed += xxh3_64_intdigest(cache_salt.encode(), 1)
    return seed & _U64


def block_hashes(
    token_ids: TokenIds,
    block_size: int,
    lora: str = "",
    cache_salt: str = "",
    media: Iterable[tuple[bytes, int, int]] = (),
) -> array[int]:
    """Returns the hashes of all full blocks of a prompt.

    Args:
        token_ids: ids of the prompt.
        block_size: tokens per block, as in the model's card.
        lora: adapter name; empty for the base model.
        cache_salt: tenant salt; empty for none.
        media: the images and other media items of the prompt, in order: content hash (the first 16 bytes of the
            sha-256 of the file), index of the first of its tokens, and number of its tokens.

    Returns:
        array("Q") of len(token_ids) // block_size hashes.
    """
    if block_size < 1:
        raise ValueError("block_size must be at least 1")
    seed = _seed(lora, cache_salt)
    stride = block_size * 4
    packed = memoryview(packed_ids(token_ids))
    hashes = array("Q")
    parent: int | None = None
    items = list(media)
    for start in range(0, len(packed) - stride + 1, stride):
        block: bytes | memoryview = packed[start : start + stride]
        if items:
            first = start // 4
            contents = [item for item, at, length in items if at < first + block_size and at + length > first]
            block = b"".join((block, *contents))
        local = xxh3_64_intdigest(block, seed)
        parent = local if parent is None else xxh3_64_intdigest(_PAIR(parent, local), seed)
        hashes.append(parent)
    return hashes
