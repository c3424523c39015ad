"""Measures the stages of a decision."""

from __future__ import annotations

import time


class Stopwatch:
    """Starts when created; `laps` has the seconds of each stage in order."""

    def __init__(self) -> None:
        self._started = self._lap = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Ends a stage and starts the next one."""
        now = time.perf_counter()
        self.laps[stage] = now - self._lap
        self._lap = now

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started
