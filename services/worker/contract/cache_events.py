"""Changes of an engine's prefix cache, in the block hashes shared by all services."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

log = logging.getLogger(__name__)


class CacheTier(IntEnum):
    """The storage tier of a cached block; the values of `sluice.v1.CacheTier`."""

    DEVICE = 1
    HOST = 2
    DISK = 3


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that have become reusable; `hashes` is an array("Q") of chained block hashes."""

    hashes: array[int]
    tier: CacheTier = CacheTier.DEVICE


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that are no longer reusable."""

    hashes: array[int]
    tier: CacheTier = CacheTier.DEVICE


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The removal of all blocks on all tiers."""


KvEvent = BlocksStored | BlocksRemoved | CacheCleared
KvListener = Callable[[Sequence[KvEvent]], None]


class KvEventSource:
    """Publishes the cache events of one data-parallel rank, once per engine step, in order."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._listeners: list[KvListener] = []

    def subscribe(self, listener: KvListener) -> None:
        """Registers a listener that is called with the events of each step; it must neither raise nor block."""
        self._listeners.append(listener)

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Passes events to every listener; one that raises harms neither the others nor the engine's step."""
        for listener in self._listeners:
            try:
                listener(events)
            except Exception:
                log.exception("a listener of KV events failed")
