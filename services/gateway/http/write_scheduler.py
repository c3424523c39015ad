"""When text goes out to the clients.

Text is written as soon as the event loop gets to it, but a round of writes that took T is followed by a pause of T
before the next: at most half of the process's time goes into writing, the other half takes in what arrives, and what
arrives for one client meanwhile becomes one write. Under light load T is a few microseconds, without effect; under
heavy load tokens coalesce instead of queueing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter

from services.gateway.http.keepalive import KeepaliveMonitor

PAUSE_PER_WRITING = 1.0
LONGEST_PAUSE_S = 0.05


class WriteScheduler:
    """Collects callbacks that write, and calls each once a round.

    Attributes:
        silence: looks after streams that say nothing, and after clients that take nothing.
    """

    def __init__(self, silence: KeepaliveMonitor | None = None) -> None:
        self.silence = KeepaliveMonitor() if silence is None else silence
        self._loop = asyncio.get_running_loop()
        self._due: list[Callable[[], None]] = []
        self._scheduled = False
        self._not_before = 0.0

    def soon(self, write: Callable[[], None]) -> None:
        """Calls `write` in the next round; the caller makes sure to ask once per round."""
        self._due.append(write)
        if not self._scheduled:
            self._scheduled = True
            wait = self._not_before - perf_counter()
            if wait > 0:
                self._loop.call_later(wait, self._round)
            else:
                self._loop.call_soon(self._round)

    def _round(self) -> None:
        started = perf_counter()
        self._scheduled = False
        due, self._due = self._due, []
        for write in due:
            write()
        ended = perf_counter()
        self._not_before = ended + min((ended - started) * PAUSE_PER_WRITING, LONGEST_PAUSE_S)
