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

    Attributes:
        used: Number of blocks used by sequences.
        events: Cache events since `take_events`, in order.
    """

    def __init__(self, total: int, index: bool = True) -> None:
        self.total = total
        self.used = 0
        self.events: list[KvEvent] = []
        self._index = index
        self._references = [0] * total
        self._hash_of: list[int | None] = [None] * total
        self._blocks_by_hash: dict[int, dict[int, None]] = {}
        self._empty = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated, including idle ones."""
        return self.total - self.used

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
                self.used += 1
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Returns new blocks with one reference each; evicts the least recently used idle ones if too few are empty.

        Raises:
            IndexError: When fewer are available; check `available` first.
        """
        if count > self.available:
            raise IndexError("too few KV-cache blocks are available")
        blocks = self._empty[: -count - 1 : -1]
        del self._empty[len(self._empty) - len(blocks) :]
        while len(blocks) < count:
            block, _ = self._idle.popitem(last=False)
            self._evict(block)
            blocks.append(block)
        for block in blocks:
            self._references[block] = 1
        self.used += count
        return blocks

    def store(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """Makes full, computed blocks reusable, each under its hash."""
        if not self._index:
            return
        new, blocks_by_hash = array("Q"), self._blocks_by_hash
        for block, block_hash in zip(blocks, hashes, strict=True):
            if self._hash_of[block] is not None:
                continue
            self._hash_of[block] = block_hash
            if block_hash in blocks_by_hash:
                blocks_by_hash[block_hash][block] = None
            else:
                blocks_by_hash[block_hash] = {block: None}
                new.append(block_hash)
        if not new:
            return
        last = self.events[-1] if self.events else None
        if isinstance(last, BlocksStored):
            last.hashes.extend(new)
        else:
            self.events.append(BlocksStored(new))

    def release(self, blocks: Sequence[int]) -> None:
        """Removes one reference from each block of a sequence, given in sequence order.

        The end of a prefix becomes evictable before its start, which more requests share.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self.used -= 1
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
        self.events.append(CacheCleared())

    def take_events(self) -> list[KvEvent]:
        """Returns and clears the cache events since the last call, in order."""
        events, self.events = self.events, []
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
        last = self.events[-1] if self.events else None
        if isinstance(last, BlocksRemoved):
            last.hashes.append(block_hash)
        else:
            self.events.append(BlocksRemoved(array("Q", (block_hash,))))
