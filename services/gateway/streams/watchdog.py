"""Workers that are reachable and say nothing although they have work: their engine hangs.

A process that is gone is noticed by its connection, one that is stopped by the connection's keepalive; an engine that
hangs in a healthy process by nothing but silence. Such a worker is treated as lost: its session ends, its generations
move, and its circuit breaker keeps new ones away until a trial is answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from services.gateway.clients.worker_link import WorkerLink

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class WorkerWatchdog:
    """Looks at all workers together: one that preempts or queues a request still speaks of others.

    Args:
        links: to the workers, now.
        computing: whether a worker has a generation to compute.
        timeout_s: longest silence of a worker that computes; 0: any.
        on_silent: called once for each worker that is given up.
    """

    def __init__(
        self,
        links: Callable[[], Iterable[WorkerLink]],
        computing: Callable[[WorkerLink], bool],
        timeout_s: float,
        on_silent: Callable[[], None],
    ) -> None:
        self._links = links
        self._computing = computing
        self._timeout_s = timeout_s
        self._on_silent = on_silent

    async def run(self) -> None:
        """Looks until cancelled; returns at once when any silence is allowed."""
        while self._timeout_s:
            await asyncio.sleep(min(LOOK_EVERY_S, self._timeout_s / 4))
            self.look()

    def look(self) -> None:
        """Gives up the workers that have been silent for too long."""
        for link in list(self._links()):
            if link.connected and link.live and link.silent_s >= self._timeout_s and self._computing(link):
                log.warning(
                    "a worker says nothing and is taken for lost",
                    extra={"worker": link.worker_id, "silent_s": round(link.silent_s), "generations": link.live},
                )
                self._on_silent()
                link.break_off_silent()
