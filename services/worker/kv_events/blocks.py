"""What is known about the engine's blocks: their hashes in everyone's scheme, and on which tiers they lie."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from services.common.hashing import block_hashes
from services.common.packing import pack_u32
from services.worker.contract.cache_events import CacheTier
from services.worker.kv_events.events import EngineHash

BlockKey = tuple[int, EngineHash]
"""Cache group and engine hash."""


class BlockRun:
    """Blocks of ours that are there as long as all of some engine blocks are.

    One engine block makes one or several of ours, or, where the engine's blocks are smaller, several make one.
    """

    __slots__ = ("hashes", "members")

    def __init__(self, hashes: Sequence[int], members: Sequence[Block]) -> None:
        self.hashes = hashes
        self.members = members

    def lies_on(self, tier: CacheTier) -> bool:
        """Whether every engine block it needs is on a tier."""
        return all(member.copies[tier] for member in self.members)


class Block:
    """One engine block.

    Attributes:
        seed_names: adapter and salt of its sequence.
        tail: hash of the last whole block of ours up to here; None before the first.
        rest: packed ids after that one.
        hashable: False when its content is more than tokens; neither are blocks after it.
        copies: how many there are on each tier.
        spans: those it is a member of.
    """

    __slots__ = ("copies", "hashable", "key", "parent", "rest", "seed_names", "spans", "tail", "unfinished")

    def __init__(self, key: BlockKey, parent: Block | None, seed_names: tuple[str, str], hashable: bool) -> None:
        self.key = key
        self.parent = parent
        self.seed_names = seed_names
        self.hashable = hashable
        self.tail: int | None = parent.tail if parent else None
        self.rest: bytes = parent.rest if parent else b""
        self.unfinished: tuple[Block, ...] = parent.unfinished if parent else ()
        self.copies: Counter[CacheTier] = Counter()
        self.spans: list[BlockRun] = []

    def fill(self, token_ids: array[int], block_size: int) -> None:
        """Works out which blocks of ours end within these tokens, which follow those of the parent."""
        packed = self.rest + pack_u32(token_ids)
        hashes = block_hashes(packed, block_size, *self.seed_names, parent=self.tail)
        members = (*self.unfinished, self)
        if hashes:
            self.tail = hashes[-1]
            span = BlockRun(hashes, members)
            for member in members:
                member.spans.append(span)
        self.rest = packed[len(hashes) * block_size * 4 :]
        if not self.rest:
            self.unfinished = ()
        else:
            self.unfinished = (self,) if hashes else members

    def unlink(self) -> None:
        """Forgets the spans it is part of, for it will never be there again."""
        for span in self.spans:
            for member in span.members:
                if member is not self:
                    member.spans.remove(span)
        self.spans = []


class BlockTable:
    """Every block that lies somewhere, and the latest ones that do not any more.

    An offloaded copy may be reported after its original is gone, and without its tokens; and a block may return.

    Args:
        keep_gone: how many blocks that lie nowhere are remembered.
    """

    def __init__(self, keep_gone: int) -> None:
        self._keep_gone = keep_gone
        self._present: dict[BlockKey, Block] = {}
        self._gone: OrderedDict[BlockKey, Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._present)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._present.values())

    def find(self, key: BlockKey) -> Block | None:
        """A block that is remembered, wherever it lies."""
        return self._present.get(key) or self._gone.get(key)

    def is_present(self, key: BlockKey) -> bool:
        """Whether the block lies on some tier."""
        return key in self._present

    def settle(self, block: Block) -> None:
        """Files a block by whether it lies anywhere."""
        if block.copies.total():
            self._gone.pop(block.key, None)
            self._present[block.key] = block
            return
        self._present.pop(block.key, None)
        self._gone[block.key] = block
        self._gone.move_to_end(block.key)
        while len(self._gone) > self._keep_gone:
            _, oldest = self._gone.popitem(last=False)
            oldest.unlink()

    def forget_copies(self) -> None:
        """Nothing lies anywhere any more; what blocks mean stays known."""
        for block in list(self._present.values()):
            block.copies.clear()
            self.settle(block)

    def clear(self) -> None:
        """Forgets everything."""
        self._present.clear()
        self._gone.clear()
