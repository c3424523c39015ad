"""What happens to an engine's prefix cache, told in block hashes all services agree on."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum


class CacheTier(IntEnum):
    """Where a cached block lies; the numbers of `sluice.v1.CacheTier`."""

    DEVICE = 1
    HOST = 2
    DISK = 3


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that can be reused from now on; `hashes` is array("Q") of chained block hashes."""

    hashes: array[int]
    tier: CacheTier = CacheTier.DEVICE


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that cannot be reused any more."""

    hashes: array[int]
    tier: CacheTier = CacheTier.DEVICE


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Every block on every tier is gone."""


KvEvent = BlocksStored | BlocksRemoved | CacheCleared
KvListener = Callable[[Sequence[KvEvent]], None]


class KvEventSource:
    """The events of one data-parallel rank; an engine publishes once per step, in order."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._listeners: list[KvListener] = []

    def subscribe(self, listener: KvListener) -> None:
        """Calls `listener` with the events of each step; it must neither raise nor block."""
        self._listeners.append(listener)

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Tells every listener."""
        for listener in self._listeners:
            listener(events)
