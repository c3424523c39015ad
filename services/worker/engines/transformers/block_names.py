"""The library's prefix cache, under the block hashes all services agree on.

The library names a block by a hash chained over its tokens. Here that hash is ours, seeded with the request's adapter
and salt: blocks of different tenants never match, and every change of the cache is an event a router understands.
"""

from __future__ import annotations

from typing import Any

from services.common.hashing import BASE_SEED, chain, local_hash
from services.common.packing import pack_u32
from services.worker.engines.transformers.step import CacheChanges


class BlockNames:
    """Hashes blocks in place of the library's function; `seed` is set before each use, in the step thread."""

    def __init__(self) -> None:
        self.seed = BASE_SEED

    def __call__(self, parent_hash: int | None, tokens: list[int]) -> int:
        """The hash of a full block after its parent, or first when that is None."""
        return chain(parent_hash, local_hash(pack_u32(tokens), self.seed), self.seed)


def watched(ledger: Any, news: CacheChanges) -> None:
    """Makes a ledger of the library tell what it registers and forgets."""
    register, release, evict = ledger.register_new_hash, ledger.release, ledger.evict_cached_blocks

    def register_new_hash(block_id: int, block_hash: int) -> int | None:
        twin: int | None = register(block_id, block_hash)
        if twin is None:
            news.stored(block_hash)
        return twin

    def release_block(block_id: int, no_cache: bool = False) -> bool:
        known = ledger.block_to_hash.get(block_id)
        gone: bool = release(block_id, no_cache)
        if known is not None and block_id not in ledger.block_to_hash:
            news.removed(known)
        return gone

    def evict_cached_blocks() -> list[int]:
        hashes = [ledger.block_to_hash[block_id] for block_id in ledger.cached_blocks]
        evicted: list[int] = evict()
        for block_hash in hashes:
            news.removed(block_hash)
        return evicted

    ledger.register_new_hash, ledger.release = register_new_hash, release_block
    ledger.evict_cached_blocks = evict_cached_blocks


def forget_names(ledger: Any, news: CacheChanges) -> None:
    """Blocks that are in use keep their contents, and nobody finds them any more."""
    for block_id, block_hash in list(ledger.block_to_hash.items()):
        if block_id not in ledger.cached_blocks:
            del ledger.block_to_hash[block_id], ledger.hash_to_block[block_hash]
            news.removed(block_hash)
