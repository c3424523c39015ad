"""Schedules writes to clients.

Pending text is written in the next event loop iteration, but a round of writes that took T is followed by a pause of T:
at most half of the process's time is spent writing, and text that arrives for a client during the pause becomes one
write. Under light load T is a few microseconds; under heavy load tokens coalesce instead of queueing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import perf_counter

from services.common.base.shared_steps import shared_step
from services.gateway.http.keepalive import KeepaliveMonitor

PAUSE_RATIO = 1.0
MAX_PAUSE_S = 0.05
"""Seconds between two rounds of writes to clients."""

log = logging.getLogger(__name__)


class WriteScheduler:
    """Collects write callbacks and calls each once per round.

    Attributes:
        keepalive: monitors idle streams and clients that do not read.
    """

    def __init__(self, keepalive: KeepaliveMonitor | None = None) -> None:
        self.keepalive = KeepaliveMonitor() if keepalive is None else keepalive
        self._loop = asyncio.get_running_loop()
        self._due: list[Callable[[], None]] = []
        self._scheduled = False
        self._not_before = 0.0

    def soon(self, write: Callable[[], None]) -> None:
        """Calls `write` in the next round; the caller must schedule it only once per round.

        What it raises is logged; a writer whose client must be told handles its own failures.
        """
        self._due.append(write)
        if not self._scheduled:
            self._scheduled = True
            delay = self._not_before - perf_counter()
            if delay > 0:
                self._loop.call_later(delay, self._round)
            else:
                self._loop.call_soon(self._round)

    @shared_step("gateway.writes")
    def _round(self) -> None:
        started = perf_counter()
        self._scheduled = False
        due, self._due = self._due, []
        for write in due:
            try:
                write()
            except Exception:  # the other clients' text is written all the same
                log.exception("writing to a client failed")
        ended = perf_counter()
        self._not_before = ended + min((ended - started) * PAUSE_RATIO, MAX_PAUSE_S)
