"""The paged KV cache: blocks with reference counts, reused by prefix, evicted least recently used first."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent


class BlockPool:
    """Blocks 0 … total-1. A block is held by sequences, or idle (held by none but reusable), or empty.

    Only blocks that were stored under a hash can be found again. As in vLLM, blocks with the same content are not made
    one: each waits for its own eviction, and the content is gone when the last of them is.

    Args:
        total: number of blocks.
        index: without one nothing is stored and nothing is found again.
    """

    def __init__(self, total: int, index: bool = True) -> None:
        self.total = total
        self._index = index
        self._references = [0] * total
        self._hash_of: list[int | None] = [None] * total
        self._by_hash: dict[int, dict[int, None]] = {}
        self._empty = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._events: list[KvEvent] = []

    @property
    def available(self) -> int:
        """Blocks that can be allocated now, idle ones included."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks held by sequences."""
        return self.total - self.available

    @property
    def cached(self) -> int:
        """Blocks that hold a reusable prefix, held or idle."""
        return len(self._by_hash)

    def cached_hashes(self) -> set[int]:
        """Hashes of all reusable blocks."""
        return set(self._by_hash)

    def find_prefix(self, hashes: Sequence[int], limit: int) -> list[int]:
        """The cached blocks of the longest known prefix, at most `limit` of them."""
        found: list[int] = []
        for index in range(min(limit, len(hashes))):
            copies = self._by_hash.get(hashes[index])
            if not copies:
                break
            found.append(next(iter(copies)))
        return found

    def can_hold(self, prefix: Sequence[int], fresh: int) -> bool:
        """Whether `fresh` blocks can be allocated while the prefix is held."""
        idle = sum(1 for block in prefix if self._references[block] == 0)
        return fresh <= self.available - idle

    def hold(self, prefix: Sequence[int]) -> None:
        """Adds a reference to each block of a found prefix."""
        for block in prefix:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def allocate(self) -> int:
        """A fresh block with one reference, evicting the least recently used idle one when none is empty.

        Raises:
            IndexError: nothing is available; ask `available` first.
        """
        if self._empty:
            block = self._empty.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        else:
            raise IndexError("no KV-cache block is available")
        self._references[block] = 1
        return block

    def store(self, block: int, block_hash: int) -> None:
        """The block is full and computed: it can be found under its hash from now on."""
        if not self._index or self._hash_of[block] is not None:
            return
        copies = self._by_hash.setdefault(block_hash, {})
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
        """Drops one reference of each block of a sequence, in sequence order.

        The end of a prefix becomes evictable before its beginning, which more requests share.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hash_of[block] is None:
                    self._empty.append(block)
                else:
                    self._idle[block] = None

    def clear(self) -> None:
        """Forgets every reusable prefix; sequences keep the blocks they hold."""
        for copies in self._by_hash.values():
            for block in copies:
                self._hash_of[block] = None
        self._by_hash.clear()
        self._empty.extend(self._idle)
        self._idle.clear()
        self._events.append(CacheCleared())

    def take_events(self) -> list[KvEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        assert block_hash is not None
        self._hash_of[block] = None
        copies = self._by_hash[block_hash]
        del copies[block]
        if copies:
            return
        del self._by_hash[block_hash]
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved):
            last.hashes.append(block_hash)
        else:
            self._events.append(BlocksRemoved(array("Q", (block_hash,))))
