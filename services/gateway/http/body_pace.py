"""Spaces out the parsing of large request bodies, to leave the event loop to other requests.

A body of several megabytes blocks the event loop for tens of milliseconds while it is counted, parsed, validated and
translated. To keep a series of them from blocking all other requests, each large body waits for its turn, and the next
turn starts after a pause in proportion to the time that the last one took. Isolated large bodies do not wait.
"""

from __future__ import annotations

import asyncio
from time import thread_time

from services.common.budgets import Budget
from services.common.errors import ErrorKind

SETTING = "--large-body-share"
LARGE_BYTES = 64 << 10
"""Longer bodies wait for their turn; shorter ones block the event loop for a millisecond at most."""
SHARE = 0.25


class BodyPace:
    """Schedules the turns of large bodies, first come, first served.

    Args:
        share: maximum share of the event loop's time for consecutive large bodies, between 0 and 1.
    """

    def __init__(self, share: float = SHARE) -> None:
        self._pause_ratio = 1 / share - 1  # seconds of pause for each second of work
        self._turns = asyncio.Lock()
        self._next_at = 0.0
        self._refused = Budget("body_time", 0, SETTING)

    async def turn(self, timeout_s: float) -> None:
        """Waits until a large body may be parsed; measures the caller's work until its next suspension.

        Args:
            timeout_s: longest wait.

        Raises:
            SluiceError: UNAVAILABLE if the turn does not come in time.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await self._turns.acquire()
                try:
                    if (pause := self._next_at - loop.time()) > 0:
                        await asyncio.sleep(pause)
                except BaseException:
                    self._turns.release()
                    raise
        except TimeoutError:
            raise self._refused.refuse(
                f"Too many large request bodies arrived at once; this one waited {timeout_s:g} s to be parsed",
                kind=ErrorKind.UNAVAILABLE,
                retry_after_ms=1000,
            ) from None
        # Runs when the caller first suspends; the next turn starts only then.
        loop.call_soon(self._end, thread_time())

    def _end(self, started: float) -> None:
        self._next_at = asyncio.get_running_loop().time() + (thread_time() - started) * self._pause_ratio
        self._turns.release()
