"""The engine's blocks: the Sluice block hashes they correspond to, and the tiers that hold them."""

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
    """Sluice blocks that are cached while all of the engine blocks they consist of are.

    One engine block corresponds to one or several Sluice blocks; smaller engine blocks share one.
    """

    __slots__ = ("hashes", "members")

    def __init__(self, hashes: Sequence[int], members: Sequence[Block]) -> None:
        self.hashes = hashes
        self.members = members

    def is_on(self, tier: CacheTier) -> bool:
        """Whether every engine block of the run is on a tier."""
        return all(member.copies[tier] for member in self.members)


class Block:
    """One engine block.

    Attributes:
        seed_names: adapter and salt of its sequence.
        tail: hash of the last complete Sluice block up to here; None before the first.
        rest: packed token ids after that block.
        hashable: whether its content, and that of all its predecessors, consists of tokens only.
        unfinished: engine blocks that hold the ids in `rest`.
        copies: number of copies on each tier.
        runs: the block runs it is a member of.
    """

    __slots__ = ("copies", "hashable", "key", "parent", "rest", "runs", "seed_names", "tail", "unfinished")

    def __init__(self, key: BlockKey, parent: Block | None, seed_names: tuple[str, str], hashable: bool) -> None:
        self.key = key
        self.parent = parent
        self.seed_names = seed_names
        self.hashable = hashable
        self.tail: int | None = parent.tail if parent else None
        self.rest: bytes = parent.rest if parent else b""
        self.unfinished: tuple[Block, ...] = parent.unfinished if parent else ()
        self.copies: Counter[CacheTier] = Counter()
        self.runs: list[BlockRun] = []

    def fill(self, token_ids: array[int], block_size: int) -> None:
        """Computes the Sluice blocks that end within these tokens, which follow the parent's."""
        packed = self.rest + pack_u32(token_ids)
        hashes = block_hashes(packed, block_size, *self.seed_names, parent=self.tail)
        members = (*self.unfinished, self)
        if hashes:
            self.tail = hashes[-1]
            run = BlockRun(hashes, members)
            for member in members:
                member.runs.append(run)
        self.rest = packed[len(hashes) * block_size * 4 :]
        if not self.rest:
            self.unfinished = ()
        else:
            self.unfinished = (self,) if hashes else members

    def unlink(self) -> None:
        """Removes its runs from all members, because the block will never be cached again."""
        for run in self.runs:
            for member in run.members:
                if member is not self:
                    member.runs.remove(run)
        self.runs = []


class BlockTable:
    """Holds every cached block and the most recently removed ones.

    Removed blocks are retained because an offloaded copy may be reported after its original was removed, and without
    its tokens, and because a block may be stored again.

    Args:
        keep_gone: number of removed blocks to retain.
    """

    def __init__(self, keep_gone: int) -> None:
        self._keep_removed = keep_gone
        self._cached: dict[BlockKey, Block] = {}
        self._removed: OrderedDict[BlockKey, Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._cached)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._cached.values())

    def find(self, key: BlockKey) -> Block | None:
        """Returns a cached or retained block; None if unknown."""
        return self._cached.get(key) or self._removed.get(key)

    def update(self, block: Block) -> None:
        """Classifies a block as cached or removed after its copies have changed."""
        if block.copies.total():
            self._removed.pop(block.key, None)
            self._cached[block.key] = block
            return
        self._cached.pop(block.key, None)
        self._removed[block.key] = block
        self._removed.move_to_end(block.key)
        while len(self._removed) > self._keep_removed:
            _, oldest = self._removed.popitem(last=False)
            oldest.unlink()

    def remove_copies(self) -> None:
        """Marks every block as removed; retains their hashes."""
        for block in list(self._cached.values()):
            block.copies.clear()
            self.update(block)

    def clear(self) -> None:
        """Removes all blocks, including the retained ones."""
        self._cached.clear()
        self._removed.clear()
