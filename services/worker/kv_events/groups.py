"""The cache groups of hybrid models: a prefix is reusable while the group that keeps all of its blocks has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from services.worker.contract.cache_events import CacheCleared, CacheTier, KvEvent
from services.worker.kv_events.events import PREFIX_KINDS, EngineCleared, EngineEvent, EngineStored
from services.worker.kv_events.translation import KEEP_GONE, Translator


class GroupTranslator:
    """Tracks the cache of one engine rank, by the group that determines which prefixes are reusable.

    Where the engine reports the kinds of its groups, that is the first one of a kind that keeps all of its blocks.
    Where it does not, each group is tracked, and the one that holds the most leads: all groups store the blocks of a
    sequence, and sliding-window or similar ones drop the older.

    Args:
        block_size, counts_copies, keep_gone: as in `Translator`.
    """

    def __init__(self, block_size: int, *, counts_copies: bool, keep_gone: int = KEEP_GONE) -> None:
        self._new = partial(Translator, block_size, counts_copies=counts_copies, keep_gone=keep_gone)
        self._leading = self._new()
        self._group: int | None = None
        self._is_named = False
        self._others: dict[int, Translator] = {}

    @property
    def orphans(self) -> int:
        """Number of blocks that could not be translated because their parent is unknown."""
        return self._leading.orphans

    def apply(self, events: Sequence[EngineEvent]) -> list[KvEvent]:
        """Returns the translated events; raises as `Translator.apply`."""
        leading: list[EngineEvent] = []
        others: defaultdict[int, list[EngineEvent]] = defaultdict(list)
        for event in events:
            if isinstance(event, EngineCleared):
                leading.append(event)
                for group in self._others.keys() | others.keys():
                    others[group].append(event)
            elif event.group is None or event.group == self._group:
                if not isinstance(event, EngineStored) or event.kind in PREFIX_KINDS:
                    leading.append(event)
            elif isinstance(event, EngineStored):
                if event.kind not in PREFIX_KINDS or self._is_named:
                    continue
                if self._group is None:
                    self._group, self._is_named = event.group, bool(event.kind)
                    leading.append(event)
                else:
                    others[event.group].append(event)
            elif event.group in self._others or event.group in others:
                others[event.group].append(event)
        translated = self._leading.apply(leading)
        for group, of_group in others.items():
            self._others.setdefault(group, self._new()).apply(of_group)
        return self._follow(translated)

    def forget(self) -> list[KvEvent]:
        """Removes all blocks, as `Translator.forget`."""
        for other in self._others.values():
            other.forget()
        return self._leading.forget()

    def lose(self) -> list[KvEvent]:
        """Removes all blocks after events were lost, as `Translator.lose`."""
        for other in self._others.values():
            other.lose()
        return self._leading.lose()

    def heal(self) -> None:
        """Treats every block stored from now on as evidence that its predecessors are cached."""
        for translator in (self._leading, *self._others.values()):
            translator.heal()

    def reset(self) -> list[KvEvent]:
        """Discards all state, because the engine has restarted."""
        self._group, self._is_named = None, False
        self._others.clear()
        return self._leading.reset()

    def snapshot(self) -> list[KvEvent]:
        """Returns the current cache as events."""
        return self._leading.snapshot()

    def held(self, tier: CacheTier = CacheTier.DEVICE) -> int:
        """Returns the number of Sluice blocks on a tier."""
        return self._leading.held(tier)

    def holds(self, hashes: Iterable[int], tier: CacheTier = CacheTier.DEVICE) -> bool:
        """Whether a tier has all of these Sluice blocks."""
        return self._leading.holds(hashes, tier)

    def _follow(self, translated: list[KvEvent]) -> list[KvEvent]:
        """Lets another group lead if it holds more; returns the events after which a listener has its blocks."""
        if not self._others or self._group is None:
            return translated
        group = max(self._others, key=lambda name: self._others[name].held())
        if self._others[group].held() <= self._leading.held():
            return translated
        self._others[self._group], self._leading = self._leading, self._others.pop(group)
        self._group = group
        return [CacheCleared(), *self._leading.snapshot()]
