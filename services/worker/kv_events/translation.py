"""Translates engine events to cache events in Sluice block hashes, and tracks the blocks that the engine holds."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from services.common.base.errors import invalid
from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheTier, KvEvent
from services.worker.kv_events.blocks import Block, BlockRun, BlockTable
from services.worker.kv_events.events import (
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
    MalformedEvents,
)

KEEP_GONE = 65_536


class Translator:
    """Tracks one cache group of an engine's rank.

    Args:
        block_size: tokens per Sluice block; the engine's block size must be a multiple or a divisor of it.
        counts_copies: whether the engine reports every copy of a block that it stores or removes, as vLLM does;
            otherwise repeated stores of a block count once.
        keep_gone: number of removed blocks to retain.

    Attributes:
        orphans: number of blocks that could not be translated because their parent is unknown.
    """

    def __init__(self, block_size: int, *, counts_copies: bool, keep_gone: int = KEEP_GONE) -> None:
        self._block_size = block_size
        self._counts_copies = counts_copies
        self._table = BlockTable(keep_gone)
        self._held: dict[CacheTier, Counter[int]] = {}
        self._heals = False
        self._size_matched = False
        self._out: list[KvEvent] = []
        self.orphans = 0

    def apply(self, events: Sequence[EngineEvent]) -> list[KvEvent]:
        """Returns the translated events.

        Raises:
            MalformedEvents: an event's block size is invalid, although those of earlier events were valid.
            SluiceError: INVALID_ARGUMENT when the engine's block size is incompatible with the configured one from the
                start.
        """
        for event in events:
            if isinstance(event, EngineStored):
                self._store(event)
            elif isinstance(event, EngineRemoved):
                self._remove(event)
            elif isinstance(event, EngineCleared):
                self._drop_all()
        return self._take()

    def forget(self) -> list[KvEvent]:
        """Removes all blocks, because the engine has dropped its cache."""
        self._drop_all()
        return self._take()

    def lose(self) -> list[KvEvent]:
        """Removes all blocks after events were lost, because the cache is unknown; retains the blocks' hashes.

        A block that is stored later implies that its predecessors are cached, so the cache becomes known again.
        """
        self._drop_all()
        self.heal()
        return self._take()

    def heal(self) -> None:
        """Treats every block stored from now on as evidence that its predecessors are cached."""
        self._heals = True

    def reset(self) -> list[KvEvent]:
        """Discards all state, because the engine has restarted."""
        self._drop_all()
        self._table.clear()
        self._heals = False
        return self._take()

    def snapshot(self) -> list[KvEvent]:
        """Returns the current cache as events."""
        return [BlocksStored(array("Q", held), tier) for tier, held in self._held.items() if held]

    def held(self, tier: CacheTier = CacheTier.DEVICE) -> int:
        """Returns the number of Sluice blocks on a tier."""
        return len(self._held.get(tier, ()))

    def holds(self, hashes: Iterable[int], tier: CacheTier = CacheTier.DEVICE) -> bool:
        """Whether a tier has all of these Sluice blocks."""
        held = self._held.get(tier, Counter())
        return all(held[block_hash] for block_hash in hashes)

    def _take(self) -> list[KvEvent]:
        events, self._out = self._out, []
        return events

    def _drop_all(self) -> None:
        self._table.remove_copies()
        self._held.clear()
        self._out = [CacheCleared()]

    def _store(self, event: EngineStored) -> None:
        if not event.token_ids and event.opaque_from is None:
            self._store_known(event)
            return
        self._check(event.block_size)
        size = event.block_size
        if event.opaque_from != 0 and len(event.token_ids) != len(event.hashes) * size:
            self.orphans += len(event.hashes)
            return
        parent = None if event.parent is None else self._table.find(event.parent)
        if parent is None and event.parent is not None:
            self.orphans += len(event.hashes)
            return
        for index, engine_hash in enumerate(event.hashes):
            block = self._table.find(engine_hash)
            if block is None:
                block = _new_block(engine_hash, parent, event, index)
                if block.hashable:
                    items = event.media[index] if index < len(event.media) else ()
                    block.fill(event.token_ids[index * size : (index + 1) * size], self._block_size, items)
            self._add_copy(block, event.tier)
            parent = block

    def _store_known(self, event: EngineStored) -> None:
        for engine_hash in event.hashes:
            block = self._table.find(engine_hash)
            if block is None:
                self.orphans += 1
            else:
                self._add_copy(block, event.tier)

    def _add_copy(self, block: Block, tier: CacheTier) -> None:
        if not self._counts_copies and block.copies[tier]:
            return
        self._change(block, tier, +1)
        if self._heals and tier is CacheTier.DEVICE:
            ancestor = block.parent
            while ancestor is not None and not (current := self._table.find(ancestor.key) or ancestor).copies[tier]:
                self._change(current, tier, +1)
                ancestor = current.parent

    def _remove(self, event: EngineRemoved) -> None:
        for engine_hash in event.hashes:
            block = self._table.find(engine_hash)
            if block is not None and block.copies[event.tier]:
                self._change(block, event.tier, -1)

    def _change(self, block: Block, tier: CacheTier, copies: int) -> None:
        before = block.copies[tier]
        block.copies[tier] += copies
        if before == 0:
            self._table.update(block)
            for run in block.runs:
                if run.is_on(tier):
                    self._publish_stored(run, tier)
        elif block.copies[tier] == 0:
            for run in block.runs:
                # The run was complete until this change if all other members are on the tier.
                if all(member is block or member.copies[tier] for member in run.members):
                    self._publish_removed(run, tier)
            self._table.update(block)

    def _publish_stored(self, run: BlockRun, tier: CacheTier) -> None:
        held = self._held.setdefault(tier, Counter())
        added = [block_hash for block_hash in run.hashes if not held[block_hash]]
        held.update(run.hashes)
        if not added:
            return
        last = self._out[-1] if self._out else None
        if isinstance(last, BlocksStored) and last.tier is tier:
            last.hashes.extend(added)
        else:
            self._out.append(BlocksStored(array("Q", added), tier))

    def _publish_removed(self, run: BlockRun, tier: CacheTier) -> None:
        held = self._held[tier]
        held.subtract(run.hashes)
        removed = [block_hash for block_hash in run.hashes if not held[block_hash]]
        for block_hash in removed:
            del held[block_hash]
        if not removed:
            return
        last = self._out[-1] if self._out else None
        if isinstance(last, BlocksRemoved) and last.tier is tier:
            last.hashes.extend(removed)
        else:
            self._out.append(BlocksRemoved(array("Q", removed), tier))

    def _check(self, engine_block_size: int) -> None:
        block_size = self._block_size
        if engine_block_size < 1:
            raise MalformedEvents(f"an event has a block size of {engine_block_size}")
        if not engine_block_size % block_size or not block_size % engine_block_size:
            self._size_matched = True
        elif self._size_matched:  # earlier events were compatible, so this one is malformed
            raise MalformedEvents(
                f"an event has a block size of {engine_block_size}, incompatible with the configured {block_size}"
            )
        else:
            raise invalid(
                f"The engine's block size is {engine_block_size} and the configured one is {block_size}; one must be a "
                "multiple of the other. Set --block-size to the engine's.",
                param="block_size",
            )


def _new_block(key: EngineHash, parent: Block | None, event: EngineStored, index: int) -> Block:
    plain = event.opaque_from is None or index < event.opaque_from
    if parent is None:
        return Block(key, None, (event.lora, event.salt), plain)
    return Block(key, parent, parent.seed_names, parent.hashable and plain)
