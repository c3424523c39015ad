"""Engine events in, cache events in everyone's block hashes out; keeps the mirror of what the engine holds."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from services.common.errors import invalid
from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheTier, KvEvent
from services.worker.kv_events.blocks import Block, BlockKey, BlockRun, BlockTable
from services.worker.kv_events.events import (
    PREFIX_KINDS,
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
    MalformedEvents,
)

KEEP_GONE = 65_536


class Translator:
    """Follows one engine's cache.

    Args:
        block_size: tokens in a block of ours; the engine's must be a multiple of it, or divide it.
        counts_copies: the engine reports every copy of a block that it stores and removes, as vLLM does. Otherwise a
            block is there or not, however often it was stored.
        keep_gone: blocks that are remembered after they are gone.

    Attributes:
        orphans: blocks that could not be told because the block before them was never heard of.
    """

    def __init__(self, block_size: int, *, counts_copies: bool, keep_gone: int = KEEP_GONE) -> None:
        self._block_size = block_size
        self._counts_copies = counts_copies
        self._table = BlockTable(keep_gone)
        self._held: dict[CacheTier, Counter[int]] = {}
        self._group: int | None = None
        self._heals = False
        self._has_fitted = False
        self._out: list[KvEvent] = []
        self.orphans = 0

    def apply(self, events: Sequence[EngineEvent]) -> list[KvEvent]:
        """What these events mean.

        Raises:
            MalformedEvents: an event's block size makes no sense, while those of others before it did.
            SluiceError: INVALID_ARGUMENT when the engine's block size does not go together with ours from the start.
        """
        for event in events:
            if isinstance(event, EngineStored):
                self._store(event)
            elif isinstance(event, EngineRemoved):
                self._remove(event)
            elif isinstance(event, EngineCleared):
                self._forget()
        return self._take()

    def forget(self) -> list[KvEvent]:
        """The engine has dropped every block."""
        self._forget()
        return self._take()

    def lose(self) -> list[KvEvent]:
        """Events are missing for good: what lies where is unknown from now on, what blocks mean is not.

        A block that is stored later proves that those before it are there, so the mirror heals as the engine works.
        """
        self._forget()
        self.heal()
        return self._take()

    def heal(self) -> None:
        """From now on a stored block counts as proof of those before it."""
        self._heals = True

    def reset(self) -> list[KvEvent]:
        """It is another engine from now on."""
        self._forget()
        self._table.clear()
        self._group, self._heals = None, False
        return self._take()

    def snapshot(self) -> list[KvEvent]:
        """The whole mirror as events, to begin with."""
        return [BlocksStored(array("Q", held), tier) for tier, held in self._held.items() if held]

    def held(self, tier: CacheTier = CacheTier.DEVICE) -> int:
        """Blocks of ours on one tier."""
        return len(self._held.get(tier, ()))

    def _take(self) -> list[KvEvent]:
        events, self._out = self._out, []
        return events

    def _forget(self) -> None:
        self._table.forget_copies()
        self._held.clear()
        self._out = [CacheCleared()]

    def _store(self, event: EngineStored) -> None:
        if not self._belongs(event.group, event.kind):
            return
        if not event.token_ids and event.opaque_from is None:
            self._store_known(event)
            return
        self._check(event.block_size)
        size = event.block_size
        if event.opaque_from != 0 and len(event.token_ids) != len(event.hashes) * size:
            self.orphans += len(event.hashes)
            return
        parent = None if event.parent is None else self._table.find(self._key(event.group, event.parent))
        if parent is None and event.parent is not None:
            self.orphans += len(event.hashes)
            return
        for index, engine_hash in enumerate(event.hashes):
            key = self._key(event.group, engine_hash)
            block = self._table.find(key)
            if block is None:
                block = _follow(key, parent, event, index)
                if block.hashable:
                    block.fill(event.token_ids[index * size : (index + 1) * size], self._block_size)
            self._place(block, event.tier)
            parent = block

    def _store_known(self, event: EngineStored) -> None:
        for engine_hash in event.hashes:
            block = self._table.find(self._key(event.group, engine_hash))
            if block is None:
                self.orphans += 1
            else:
                self._place(block, event.tier)

    def _place(self, block: Block, tier: CacheTier) -> None:
        if not self._counts_copies and block.copies[tier]:
            return
        self._change(block, tier, +1)
        if self._heals and tier is CacheTier.DEVICE:
            ancestor = block.parent
            while ancestor is not None and not (known := self._table.find(ancestor.key) or ancestor).copies[tier]:
                self._change(known, tier, +1)
                ancestor = known.parent

    def _remove(self, event: EngineRemoved) -> None:
        for engine_hash in event.hashes:
            block = self._table.find(self._key(event.group, engine_hash))
            if block is not None and block.copies[event.tier]:
                self._change(block, event.tier, -1)

    def _change(self, block: Block, tier: CacheTier, copies: int) -> None:
        before = block.copies[tier]
        block.copies[tier] += copies
        if before == 0:
            self._table.settle(block)
            for span in block.spans:
                if span.lies_on(tier):
                    self._tell_stored(span, tier)
        elif block.copies[tier] == 0:
            for span in block.spans:
                # It was complete until just now if all the others are there.
                if all(member is block or member.copies[tier] for member in span.members):
                    self._tell_removed(span, tier)
            self._table.settle(block)

    def _tell_stored(self, span: BlockRun, tier: CacheTier) -> None:
        held = self._held.setdefault(tier, Counter())
        fresh = [block_hash for block_hash in span.hashes if not held[block_hash]]
        held.update(span.hashes)
        if not fresh:
            return
        last = self._out[-1] if self._out else None
        if isinstance(last, BlocksStored) and last.tier is tier:
            last.hashes.extend(fresh)
        else:
            self._out.append(BlocksStored(array("Q", fresh), tier))

    def _tell_removed(self, span: BlockRun, tier: CacheTier) -> None:
        held = self._held[tier]
        held.subtract(span.hashes)
        gone = [block_hash for block_hash in span.hashes if not held[block_hash]]
        for block_hash in gone:
            del held[block_hash]
        if not gone:
            return
        last = self._out[-1] if self._out else None
        if isinstance(last, BlocksRemoved) and last.tier is tier:
            last.hashes.extend(gone)
        else:
            self._out.append(BlocksRemoved(array("Q", gone), tier))

    def _belongs(self, group: int | None, kind: str) -> bool:
        """Whether a group is the one that decides what can be reused: the first whose cache forgets nothing."""
        if kind not in PREFIX_KINDS:
            return False
        if self._group is None:
            self._group = group
        return group is None or group == self._group

    def _key(self, group: int | None, engine_hash: EngineHash) -> BlockKey:
        return (self._group or 0) if group is None else group, engine_hash

    def _check(self, engine_block_size: int) -> None:
        ours = self._block_size
        if engine_block_size < 1:
            raise MalformedEvents(f"blocks of {engine_block_size} tokens were stored")
        if not engine_block_size % ours or not ours % engine_block_size:
            self._has_fitted = True
        elif self._has_fitted:  # the settings are right, so the event is wrong
            raise MalformedEvents(f"blocks of {engine_block_size} tokens were stored, which do not fit those of {ours}")
        else:
            raise invalid(
                f"The engine's blocks have {engine_block_size} tokens and the index's {ours}; one must be a multiple "
                "of the other. Set block-size to the engine's.",
                param="block_size",
            )


def _follow(key: BlockKey, parent: Block | None, event: EngineStored, index: int) -> Block:
    plain = event.opaque_from is None or index < event.opaque_from
    if parent is None:
        return Block(key, None, (event.lora, event.salt), plain)
    return Block(key, parent, parent.seed_names, parent.hashable and plain)
