"""Where the time of a decision goes."""

from __future__ import annotations

import time


class Stopwatch:
    """Runs from the moment it is made; seconds by stage, in order."""

    def __init__(self) -> None:
        self._started = self._lap = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """The stage is over; what comes now is the next one."""
        now = time.perf_counter()
        self.laps[stage] = now - self._lap
        self._lap = now

    @property
    def seconds(self) -> float:
        """All of it so far."""
        return time.perf_counter() - self._started
