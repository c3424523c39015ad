"""Spaces out large request bodies, so that parsing them leaves the event loop to others.

A body of some megabytes takes the event loop for tens of milliseconds: its values are counted, it is parsed, checked
and translated without a pause. One after the other they would take all of the loop's time, from every client. So each
large body waits for its turn, and the next turn comes after a pause in proportion to the time that the last one took.
Where large bodies are rare none of them waits.
"""

from __future__ import annotations

import asyncio
from time import thread_time

from services.common.budgets import Budget
from services.common.errors import ErrorKind

SETTING = "--large-body-share"
LARGE_BYTES = 64 << 10
"""Longer bodies wait for their turn; shorter ones take the loop for a millisecond at most."""
SHARE = 0.25


class BodyPace:
    """Turns of large bodies, in the order in which they arrived.

    Args:
        share: most of the event loop's time that they may take while others wait, between 0 and 1.
    """

    def __init__(self, share: float = SHARE) -> None:
        self._rest = 1 / share - 1  # seconds of pause for each second of work
        self._turns = asyncio.Lock()
        self._next_at = 0.0
        self._refused = Budget("body_time", 0, SETTING)

    async def turn(self, timeout_s: float) -> None:
        """Returns when a large body may be parsed; what the caller then does without a pause is measured.

        Args:
            timeout_s: longest wait.

        Raises:
            SluiceError: UNAVAILABLE when the turn does not come in time.
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
                f"Too many large request bodies arrive at once; this one waited {timeout_s:g} s to be parsed",
                kind=ErrorKind.UNAVAILABLE,
                retry_after_ms=1000,
            ) from None
        # Runs when the caller pauses for the first time; no other turn begins before.
        loop.call_soon(self._end, thread_time())

    def _end(self, started: float) -> None:
        self._next_at = asyncio.get_running_loop().time() + (thread_time() - started) * self._rest
        self._turns.release()
