"""Limits how often `sluice up` restarts a process, and after which pause."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable

MAX_RESTARTS = 5
"""Restarts of one process of `sluice up` within two minutes; then the suite stops."""
RESTART_WINDOW_S = 120.0
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 8.0
"""Seconds until a process of `sluice up` that ended again is restarted."""


class Restarts:
    """Allows a bounded number of restarts of each process, the first at once, each later one after a longer pause.

    Args:
        most: restarts of one process within `within_s` seconds; 0 allows none.
        first_pause_s: seconds before the second restart; doubled for each later one.
        clock: returns seconds; replaced in tests.
    """

    def __init__(
        self,
        most: int = MAX_RESTARTS,
        within_s: float = RESTART_WINDOW_S,
        first_pause_s: float = FIRST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._within_s = within_s
        self._first_pause_s = first_pause_s
        self._clock = clock
        self._restarts: defaultdict[str, deque[float]] = defaultdict(deque)

    def allow(self, name: str) -> float | None:
        """Counts a restart of the process and returns the seconds to wait before it; None if it may not restart."""
        times, now = self._restarts[name], self._clock()
        while times and now - times[0] > self._within_s:
            times.popleft()
        if len(times) >= self._most:
            return None
        pause = min(self._first_pause_s * 2 ** (len(times) - 1), MAX_PAUSE_S) if times else 0.0
        times.append(now)
        return pause
