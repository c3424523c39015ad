"""The engine's blocks: the Sluice block hashes they correspond to, and the tiers that hold them."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from services.common.base.packing import pack_u32
from services.common.types.hashing import block_hashes, chain, local_hash, seed_for
from services.worker.contract.cache_events import CacheTier
from services.worker.kv_events.events import BlockItem, EngineHash


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
        key: the engine's hash.
        seed_names: adapter and salt of its sequence.
        tail: hash of the last complete Sluice block up to here; None before the first.
        rest: packed token ids after that block.
        hashable: whether the content of all blocks up to here, this one included, is known.
        end: number of tokens up to the end of this block, from the start of its sequence.
        items: media items that have tokens in `rest`: position of their first token in the sequence, and content hash.
        unfinished: engine blocks that hold the ids in `rest`.
        copies: number of copies on each tier.
        runs: the block runs it is a member of.
    """

    __slots__ = (
        "copies",
        "end",
        "hashable",
        "items",
        "key",
        "parent",
        "rest",
        "runs",
        "seed_names",
        "tail",
        "unfinished",
    )

    def __init__(self, key: EngineHash, parent: Block | None, seed_names: tuple[str, str], hashable: bool) -> None:
        self.key = key
        self.parent = parent
        self.seed_names = seed_names
        self.hashable = hashable
        self.tail: int | None = parent.tail if parent else None
        self.rest: bytes = parent.rest if parent else b""
        self.end: int = parent.end if parent else 0
        self.items: tuple[tuple[int, bytes], ...] = parent.items if parent else ()
        self.unfinished: tuple[Block, ...] = parent.unfinished if parent else ()
        self.copies: Counter[CacheTier] = Counter()
        self.runs: list[BlockRun] = []

    def fill(self, token_ids: array[int], block_size: int, media: Sequence[BlockItem] = ()) -> None:
        """Computes the Sluice blocks that end within these tokens, which follow the parent's.

        Where the end of a media item is not known, the blocks after its first one are not hashed: see `_with_media`.

        Args:
            media: the items that have tokens in this engine block, in order.
        """
        packed = self.rest + pack_u32(token_ids)
        begin, self.end = self.end, self.end + len(token_ids)
        if self.items or media:
            hashes = self._with_media(packed, block_size, begin, media)
        else:
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

    def _with_media(self, packed: bytes, block_size: int, begin: int, media: Sequence[BlockItem]) -> array[int]:
        """Returns the hashes of the Sluice blocks in `packed`, and updates `items` and `hashable`.

        Engines report where an item begins and which engine blocks it is in, but not its length. So the Sluice blocks
        that it is in are known exactly unless it may extend over several within one engine block: the first of those
        is hashed, and everything after it is not.

        Args:
            packed: `rest` and the ids of this block.
            begin: position of this block's first token in the sequence.
            media: the items of this block.
        """
        first = begin - len(self.rest) // 4
        count = len(packed) // 4 // block_size
        items = dict(self.items)
        for content, offset in media:
            start = begin + offset
            if not 0 <= start < self.end or items.setdefault(start, content) != content:
                self.hashable = False
                return array("Q")
        starts = sorted(items)
        known = count
        contents: dict[int, list[bytes]] = {}
        for start, end in zip(starts, [*starts[1:], self.end], strict=True):
            block = max(start - first, 0) // block_size
            contents.setdefault(block, []).append(items[start])
            if (end - 1 - first) // block_size > block:
                known = min(known, block + 1)
        self.items = () if count else tuple((start, items[start]) for start in starts)
        self.hashable = known == count
        hashes, seed, stride = array("Q"), seed_for(*self.seed_names), block_size * 4
        parent = self.tail
        for block in range(known):
            local = local_hash(packed[block * stride : (block + 1) * stride], seed, contents.get(block, ()))
            parent = chain(parent, local, seed)
            hashes.append(parent)
        return hashes

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
        self._cached: dict[EngineHash, Block] = {}
        self._removed: OrderedDict[EngineHash, Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._cached)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._cached.values())

    def find(self, key: EngineHash) -> Block | None:
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
