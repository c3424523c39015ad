"""Lets a bounded number of calls through at a time; the others wait in the order in which they came.

A thousand requests that arrive together would otherwise become a thousand calls whose clocks all run while one service
works through them, and the last of them would time out for no fault of anybody. Behind a turnstile a call's timeout
measures the service, and the line is what grows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

from services.common.errors import overloaded

AT_ONCE = 256
LONGEST_LINE_S = 60.0


class ConcurrencyLimiter:
    """In front of one service.

    Args:
        peer: what is behind it, in words for messages, such as ``preprocess``.
        at_once: calls that are through at a time.
        longest_s: longest wait for one's turn.
    """

    def __init__(self, peer: str, at_once: int = AT_ONCE, longest_s: float = LONGEST_LINE_S) -> None:
        self._peer = peer
        self._turns = asyncio.Semaphore(at_once)
        self._longest_s = longest_s

    @asynccontextmanager
    async def turn(self, most_s: float = inf) -> AsyncIterator[None]:
        """Holds one turn.

        Args:
            most_s: what the caller can wait, seconds; the turnstile's own limit counts if it is shorter.

        Raises:
            SluiceError: OVERLOADED when the turn does not come in time.
        """
        if self._turns.locked():
            await self._wait(min(most_s, self._longest_s))
        else:
            await self._turns.acquire()
        try:
            yield
        finally:
            self._turns.release()

    async def _wait(self, most_s: float) -> None:
        came = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                came = await self._turns.acquire()
        if not came:  # not where the timeout is caught: its own error knows this task, and would be the context
            raise overloaded(f"Too many requests wait for the {self._peer} service; try again soon.")
