"""Keeps the engine's modelled time and the real clock together."""

from __future__ import annotations

import asyncio

# The event loop's timers are not finer than this, so shorter waits are saved up.
SHORTEST_SLEEP_S = 0.001
# An engine that fell behind (a busy machine) catches up with steps at most this far in the past.
LONGEST_LAG_S = 0.05


class StepPacer:
    """A clock that advances by modelled durations: deadlines are absolute, so rounding never adds up.

    Steps shorter than a millisecond run without sleeping; the clock then leads the real one by at most that.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time()

    def resume(self) -> None:
        """Work came after a pause: idle time is not caught up."""
        self.now = max(self.now, self._loop.time())

    async def spend(self, duration_s: float) -> None:
        """Returns about when a step that began at `now` is over; always lets other tasks run."""
        self.now = max(self.now + duration_s, self._loop.time() - LONGEST_LAG_S)
        ahead = self.now - self._loop.time()
        await asyncio.sleep(ahead if ahead >= SHORTEST_SLEEP_S else 0)
