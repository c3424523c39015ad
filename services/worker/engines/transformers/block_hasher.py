"""Makes transformers' prefix cache use Sluice's block hashes and report its changes.

The library identifies a block by a hash chained over its tokens. Replacing that function by Sluice's, seeded with the
request's adapter and cache salt, isolates tenants and lets cache changes be published as KV events.
"""

from __future__ import annotations

from typing import Any

from services.common.base.packing import pack_u32
from services.common.types.hashing import BASE_SEED, chain, local_hash
from services.worker.engines.transformers.step import CacheChanges


class BlockHasher:
    """Replaces the library's hash function; the batching thread sets `seed` before each use."""

    def __init__(self) -> None:
        self.seed = BASE_SEED

    def __call__(self, parent_hash: int | None, tokens: list[int]) -> int:
        """Returns the hash of a full block; `parent_hash` is None for a first block."""
        return chain(parent_hash, local_hash(pack_u32(tokens), self.seed), self.seed)


def record_changes(ledger: Any, changes: CacheChanges) -> None:
    """Patches a block ledger of the library to record the blocks that it registers and removes."""
    register, release, evict = ledger.register_new_hash, ledger.release, ledger.evict_cached_blocks

    def register_new_hash(block_id: int, block_hash: int) -> int | None:
        duplicate: int | None = register(block_id, block_hash)
        if duplicate is None:
            changes.stored(block_hash)
        return duplicate

    def release_block(block_id: int, no_cache: bool = False) -> bool:
        block_hash = ledger.block_to_hash.get(block_id)
        freed: bool = release(block_id, no_cache)
        if block_hash is not None and block_id not in ledger.block_to_hash:
            changes.removed(block_hash)
        return freed

    def evict_cached_blocks() -> list[int]:
        hashes = [ledger.block_to_hash[block_id] for block_id in ledger.cached_blocks]
        evicted: list[int] = evict()
        for block_hash in hashes:
            changes.removed(block_hash)
        return evicted

    ledger.register_new_hash, ledger.release = register_new_hash, release_block
    ledger.evict_cached_blocks = evict_cached_blocks


def forget_hashes(ledger: Any, changes: CacheChanges) -> None:
    """Removes the hashes of blocks in use, so that no other request reuses them."""
    for block_id, block_hash in list(ledger.block_to_hash.items()):
        if block_id not in ledger.cached_blocks:
            del ledger.block_to_hash[block_id], ledger.hash_to_block[block_hash]
            changes.removed(block_hash)
