"""Limits the number of concurrent calls to a service; the rest wait in arrival order.

Without it, a burst of a thousand requests becomes a thousand calls whose timeouts all run while one service works
through them, so the last ones time out. Behind the limiter a call's timeout measures the service alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

from services.common.base.errors import overloaded

AT_ONCE = 256
MAX_LINE_S = 60.0
"""Seconds that a call waits for its turn at a service; then it is refused as OVERLOADED."""


class ConcurrencyLimiter:
    """Limits concurrent calls to one service.

    Args:
        peer: the service's name in error messages, such as ``preprocess``.
        at_once: maximum number of concurrent calls.
        longest_s: maximum wait for a permit, seconds.
    """

    def __init__(self, peer: str, at_once: int = AT_ONCE, longest_s: float = MAX_LINE_S) -> None:
        self._peer = peer
        self._permits = asyncio.Semaphore(at_once)
        self._longest_s = longest_s

    @asynccontextmanager
    async def turn(self, most_s: float = inf) -> AsyncIterator[None]:
        """Holds a permit for the duration of the context.

        Args:
            most_s: maximum wait of this caller, seconds; the limiter's own maximum applies if it is shorter.

        Raises:
            SluiceError: OVERLOADED when no permit becomes available in time.
        """
        if self._permits.locked():
            await self._wait(min(most_s, self._longest_s))
        else:
            await self._permits.acquire()
        try:
            yield
        finally:
            self._permits.release()

    async def _wait(self, most_s: float) -> None:
        acquired = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                acquired = await self._permits.acquire()
        if not acquired:  # raised outside the handler: chaining would retain the TimeoutError and its frames
            raise overloaded(f"Too many requests are waiting for the {self._peer} service; retry shortly.")
