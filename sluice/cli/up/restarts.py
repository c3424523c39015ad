"""How often processes may be started again."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable

MOST = 3
WITHIN_S = 60.0


class Restarts:
    """Counts by name, so that a process that cannot run is not started for ever.

    Args:
        most: of one process `within_s` seconds; 0 never restarts anything.
        clock: seconds, for tests.
    """

    def __init__(self, most: int = MOST, within_s: float = WITHIN_S, clock: Callable[[], float] = time.monotonic):
        self._most = most
        self._within_s = within_s
        self._clock = clock
        self._made: defaultdict[str, deque[float]] = defaultdict(deque)

    def allow(self, name: str) -> bool:
        """Whether the process may be started again now; counted if so."""
        made, now = self._made[name], self._clock()
        while made and now - made[0] > self._within_s:
            made.popleft()
        if len(made) >= self._most:
            return False
        made.append(now)
        return True
