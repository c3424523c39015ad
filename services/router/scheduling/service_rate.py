"""How fast the requests of a model complete, from which waiting times are estimated."""

from __future__ import annotations

import time
from collections.abc import Callable

SOONEST_MS, LATEST_MS = 100, 30_000
"""Bounds of an estimate: callers neither poll at once nor stay away for long."""

UNKNOWN_MS = 1_000
"""Estimate while no request has completed."""

RECENT = 0.2  # weight of the latest interval in the mean


class ServiceRate:
    """Completion rate of a model's requests, from which waiting times are estimated.

    Args:
        now_s: returns seconds of a monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._interval_s: float | None = None
        self._last = 0.0

    def ended(self, number: int) -> None:
        """Records that this number of requests completed now."""
        if not number:
            return
        now = self._now_s()
        if self._last:
            each = (now - self._last) / number
            self._interval_s = each if self._interval_s is None else (1 - RECENT) * self._interval_s + RECENT * each
        self._last = now

    def wait_ms(self, ahead: int) -> int:
        """Returns the estimated time until a worker is free for a request with this many ahead of it."""
        if self._interval_s is None:
            return UNKNOWN_MS
        return round(min(max(self._interval_s * 1000 * (ahead + 1), SOONEST_MS), LATEST_MS))
