"""Detects stopped workers among those that no router lists any more but which have requests of this gateway.

A router removes a worker whose heartbeats stop, seconds before the worker's own connection fails its keepalive; that of
a foreign worker may fail minutes later. But a worker that has merely lost its router, or leaves, continues its
requests. So it is asked: one that responds keeps them, whether it sends tokens or not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from services.common.tasks import TaskOwner
from services.gateway.clients.worker_link import WorkerLink

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
RESPONSE_S = 5.0
"""Longer than the event loop of a healthy worker is blocked."""


class RemovedWorkers:
    """Asks silent workers that have been removed, and gives up those that do not respond: their requests move.

    Args:
        links: returns the current links to workers.
        on_silent: called once for each worker that is given up.
        tasks: owner of the calls.
    """

    def __init__(
        self, links: Callable[[], Iterable[WorkerLink]], on_silent: Callable[[], None], tasks: TaskOwner
    ) -> None:
        self._links = links
        self._on_silent = on_silent
        self._tasks = tasks
        self._asked: set[WorkerLink] = set()

    async def run(self) -> None:
        """Checks the workers until cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Asks the workers whose turn it is."""
        for link in self._links():
            if _is_suspect(link) and link not in self._asked:
                self._asked.add(link)
                self._tasks.spawn(self._ask(link), f"ask-{link.worker_id}")

    async def _ask(self, link: WorkerLink) -> None:
        try:
            if await link.responds(RESPONSE_S):
                await asyncio.sleep(RESPONSE_S)  # until the next question
            elif _is_suspect(link):
                log.warning(
                    "removed worker does not respond and is treated as lost",
                    extra={"worker": link.worker_id, "requests": link.live},
                )
                self._on_silent()
                link.give_up()
        finally:
            self._asked.discard(link)


def _is_suspect(link: WorkerLink) -> bool:
    return link.retired and link.connected and bool(link.live) and link.silent_s >= CHECK_EVERY_S
