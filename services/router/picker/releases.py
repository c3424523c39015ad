"""Reports the progress of picked requests to the reservations, many at a time."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from services.router.scheduling.decisions import Outcome
from services.router.scheduling.lifecycle import RequestLifecycle

log = logging.getLogger(__name__)

COLLECT_S = 0.005  # how long reports collect: one call of the store for all requests that progress meanwhile


class Releases:
    """Collects the reports of requests; run `run` as a task.

    A request that has ended supersedes the report that its prompt is computed.

    Args:
        store_timeout_s: time limit of the store's commands.
    """

    def __init__(self, lifecycle: RequestLifecycle, store_timeout_s: float = 1.0) -> None:
        self._lifecycle = lifecycle
        self._again_s = 2 * store_timeout_s
        self._computed: dict[str, None] = {}
        self._ended: dict[str, Outcome | None] = {}
        self._due = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def prefill_complete(self, reservation: str) -> None:
        """Reports, with the next batch, that a prompt is computed."""
        self._wake()
        self._computed[reservation] = None

    def free(self, reservation: str, outcome: Outcome | None = None) -> None:
        """Reports, with the next batch, that a request has ended."""
        self._wake()
        self._computed.pop(reservation, None)
        self._ended[reservation] = outcome

    def abandon(self, reservation: str) -> None:
        """Releases a booking whose query was cancelled: now, and again once the store must have run the query."""
        self.free(reservation)
        asyncio.get_running_loop().call_later(self._again_s, self.free, reservation)

    def _wake(self) -> None:
        if not self._computed and not self._ended:  # the first report of a batch
            self._idle.clear()
            asyncio.get_running_loop().call_later(COLLECT_S, self._due.set)

    async def run(self) -> None:
        """Sends reports until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            computed, self._computed = self._computed, {}
            ended, self._ended = self._ended, {}
            try:
                if computed:
                    await self._lifecycle.mark_prefill_complete(list(computed))
                if ended:
                    await self._lifecycle.free(list(ended), [each for each in ended.values() if each is not None])
            except Exception:  # they expire with their lifetime; those of later requests are released all the same
                log.exception("releasing reservations failed", extra={"requests": len(computed) + len(ended)})
            if not self._computed and not self._ended:
                self._idle.set()

    async def flush(self, timeout_s: float) -> None:
        """Waits until all reports have been sent, at most `timeout_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
