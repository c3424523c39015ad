"""Spaces out the reading of bodies that arrive in tiny parts, each of which is a message of its own.

A message costs the event loop a tenth of a millisecond, whatever it carries. A body may have some messages, and more in
proportion to its length; those beyond it share one rate, over all streams of an entrance. A stream whose turn has not
come is not read, so that its sender waits. Bodies in parts of ordinary sizes never wait.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from services.common.base.budgets import Budget

FREE_PARTS, BYTES_PER_PART = 16, 512
"""Parts of a body that never wait: so many, and one more for each so many of its bytes."""
PARTS_PER_S = 250
"""Further parts of all bodies together."""

_PARTS = Budget("body_chunks", FREE_PARTS, "")


class PartsPace:
    """The turns of tiny parts, first come, first served, for all streams of an entrance.

    Args:
        per_s: parts in a second.
        clock: returns monotonic seconds.
    """

    def __init__(self, per_s: float = PARTS_PER_S, clock: Callable[[], float] = monotonic) -> None:
        self._interval_s = 1 / per_s
        self._clock = clock
        self._next_at = 0.0

    def turn_s(self) -> float:
        """Takes the next turn; returns how long to wait for it."""
        _PARTS.count()
        now = self._clock()
        at = max(self._next_at, now)
        self._next_at = at + self._interval_s
        return at - now


class BodyParts:
    """The parts of one body.

    Args:
        pace: shared by the streams of an entrance.
    """

    def __init__(self, pace: PartsPace) -> None:
        self._pace = pace
        self._left = FREE_PARTS
        self._bytes = 0

    def pause_s(self, size: int) -> float:
        """Counts a part of `size` bytes; returns how long to wait before the next one is read."""
        self._bytes += size
        self._left += self._bytes // BYTES_PER_PART - 1
        self._bytes %= BYTES_PER_PART
        if self._left >= 0:
            return 0.0
        self._left = 0
        return self._pace.turn_s()
