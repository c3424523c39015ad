"""Detects hanging engines: workers that are connected and have work but send nothing.

A terminated process closes its connection, and a stopped one fails its keepalive; an engine that hangs in a
healthy process shows only in missing messages. Such a worker is treated as lost: its session ends, its generations
migrate, and its circuit breaker refuses new ones until a trial request succeeds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from services.gateway.clients.worker_link import WorkerLink

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0


class WorkerWatchdog:
    """Disconnects workers that are silent for too long.

    Silence is measured per worker, not per request: a worker that preempts or queues one request still sends messages
    for others.

    Args:
        links: returns the current links to workers.
        timeout_s: maximum silence of a worker that runs a generation; 0: no limit.
        on_silent: called once for each worker that is disconnected.
    """

    def __init__(
        self,
        links: Callable[[], Iterable[WorkerLink]],
        timeout_s: float,
        on_silent: Callable[[], None],
    ) -> None:
        self._links = links
        self._timeout_s = timeout_s
        self._on_silent = on_silent

    async def run(self) -> None:
        """Checks all workers until cancelled; returns immediately if there is no limit."""
        while self._timeout_s:
            await asyncio.sleep(min(CHECK_EVERY_S, self._timeout_s / 4))
            self.look()

    def look(self) -> None:
        """Disconnects the workers that have been silent for too long."""
        for link in list(self._links()):
            if link.connected and link.streams and link.silent_s >= self._timeout_s:
                log.warning(
                    "worker is silent and treated as lost",
                    extra={"worker": link.worker_id, "silent_s": round(link.silent_s), "generations": link.live},
                )
                self._on_silent()
                link.break_off_silent()
