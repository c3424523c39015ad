"""Detects workers that are connected and have work but send nothing.

A terminated process closes its connection, and a stopped one fails its keepalive; an engine that hangs in a healthy
process shows only in missing messages. Such a worker is treated as lost: its session ends, its generations migrate, and
its circuit breaker refuses new ones until a trial request succeeds.

A worker that no router lists any more has stopped, has lost its router, or leaves. A router notices a stop seconds
before the worker's own connection fails its keepalive; that of a foreign worker may fail minutes later. So such a
worker is asked: one that responds keeps its requests, whether it sends tokens or not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from services.common.base.tasks import TaskOwner
from services.gateway.backends.rpc.worker_link import WorkerLink

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
RESPONSE_S = 5.0
"""Longer than the event loop of a healthy worker is blocked."""


class WorkerWatchdog:
    """Disconnects workers that are silent for too long, and removed ones that do not respond: their requests move.

    Silence is measured per worker, not per request: a worker that preempts or queues one request still sends messages
    for others.

    Args:
        links: returns the current links to workers.
        timeout_s: maximum silence of a worker that runs a generation; 0: no limit.
        on_silent: called once for each worker that is disconnected.
        tasks: owner of the calls to removed workers.
    """

    def __init__(
        self,
        links: Callable[[], Iterable[WorkerLink]],
        timeout_s: float,
        on_silent: Callable[[], None],
        tasks: TaskOwner,
    ) -> None:
        self._links = links
        self._timeout_s = timeout_s
        self._on_silent = on_silent
        self._tasks = tasks
        self._asked: set[WorkerLink] = set()

    async def run(self) -> None:
        """Checks all workers until cancelled."""
        while True:
            await asyncio.sleep(min(CHECK_EVERY_S, self._timeout_s / 4) if self._timeout_s else CHECK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Disconnects the workers that have been silent for too long, and asks removed ones whose turn it is."""
        for link in list(self._links()):
            if self._timeout_s and link.connected and link.streams and link.silent_s >= self._timeout_s:
                self._report(link, "worker is silent and treated as lost")
                link.break_off_silent()
            elif _is_suspect(link) and link not in self._asked:
                self._asked.add(link)
                self._tasks.spawn(self._ask(link), f"ask-{link.worker_id}")

    async def _ask(self, link: WorkerLink) -> None:
        try:
            if await link.responds(RESPONSE_S):
                await asyncio.sleep(RESPONSE_S)  # until the next question
            elif _is_suspect(link):
                self._report(link, "removed worker does not respond and is treated as lost")
                link.give_up()
        finally:
            self._asked.discard(link)

    def _report(self, link: WorkerLink, event: str) -> None:
        log.warning(event, extra={"worker": link.worker_id, "silent_s": round(link.silent_s), "requests": link.live})
        self._on_silent()


def _is_suspect(link: WorkerLink) -> bool:
    return link.retired and link.connected and bool(link.live) and link.silent_s >= CHECK_EVERY_S
