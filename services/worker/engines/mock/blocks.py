"""The mock's paged KV cache: reference-counted blocks, reused by prefix, evicted in LRU order."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent


class BlockPool:
    """Manages blocks 0 … total-1. A block is used by sequences, or idle (unused but reusable), or empty.

    Only blocks stored under a hash can be reused. As in vLLM, blocks with equal content are not merged: each is evicted
    separately, and the content is removed with the last one.

    Args:
        total: Number of blocks.
        index: Whether blocks are indexed for reuse.
    """

    def __init__(self, total: int, index: bool = True) -> None:
        self.total = total
        self._index = index
        self._references = [0] * total
        self._hash_of: list[int | None] = [None] * total
        self._blocks_by_hash: dict[int, dict[int, None]] = {}
        self._empty = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._events: list[KvEvent] = []

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated, including idle ones."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        """Number of blocks used by sequences."""
        return self.total - self.available

    @property
    def cached(self) -> int:
        """Number of distinct reusable blocks, used or idle."""
        return len(self._blocks_by_hash)

    def cached_hashes(self) -> set[int]:
        """Returns the hashes of all reusable blocks."""
        return set(self._blocks_by_hash)

    def find_prefix(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Returns the blocks of the longest cached prefix, at most `limit`."""
        prefix: list[int] = []
        for index in range(min(limit, len(hashes))):
            copies = self._blocks_by_hash.get(hashes[index])
            if not copies:
                break
            prefix.append(next(iter(copies)))
        return prefix

    def can_hold(self, prefix: Sequence[int], fresh: int) -> bool:
        """Returns whether `fresh` blocks can be allocated while the prefix blocks are used."""
        idle = sum(1 for block in prefix if self._references[block] == 0)
        return fresh <= self.available - idle

    def hold(self, prefix: Sequence[int]) -> None:
        """Adds a reference to each block of a cached prefix."""
        for block in prefix:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def allocate(self) -> int:
        """Returns a new block with one reference; evicts the least recently used idle block if none is empty.

        Raises:
            IndexError: When no block is available; check `available` first.
        """
        if self._empty:
            block = self._empty.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._evict(block)
        else:
            raise IndexError("no KV-cache block is available")
        self._references[block] = 1
        return block

    def store(self, block: int, block_hash: int) -> None:
        """Makes a full, computed block reusable under its hash."""
        if not self._index or self._hash_of[block] is not None:
            return
        copies = self._blocks_by_hash.setdefault(block_hash, {})
        copies[block] = None
        self._hash_of[block] = block_hash
        if len(copies) > 1:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored):
            last.hashes.append(block_hash)
        else:
            self._events.append(BlocksStored(array("Q", (block_hash,))))

    def release(self, blocks: Sequence[int]) -> None:
        """Removes one reference from each block of a sequence, given in sequence order.

        The end of a prefix becomes evictable before its start, which more requests share.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hash_of[block] is None:
                    self._empty.append(block)
                else:
                    self._idle[block] = None

    def clear(self) -> None:
        """Removes all blocks from the index; sequences keep the blocks they use."""
        for copies in self._blocks_by_hash.values():
            for block in copies:
                self._hash_of[block] = None
        self._blocks_by_hash.clear()
        self._empty.extend(self._idle)
        self._idle.clear()
        self._events.append(CacheCleared())

    def take_events(self) -> list[KvEvent]:
        """Returns and clears the cache events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _evict(self, block: int) -> None:
        block_hash = self._hash_of[block]
        assert block_hash is not None
        self._hash_of[block] = None
        copies = self._blocks_by_hash[block_hash]
        del copies[block]
        if copies:
            return
        del self._blocks_by_hash[block_hash]
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved):
            last.hashes.append(block_hash)
        else:
            self._events.append(BlocksRemoved(array("Q", (block_hash,))))
