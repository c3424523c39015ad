"""Limits the number of concurrent calls to a service; the rest wait in arrival order.

Without it, a burst of a thousand requests becomes a thousand calls whose timeouts all run while one service works
through them, so the last ones time out. Behind the limiter a call's timeout measures the service alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from math import inf

from services.common.base.errors import overloaded

AT_ONCE = 256
MAX_LINE_S = 60.0
"""Seconds that a call waits for its turn at a service; then it is refused as OVERLOADED."""


class ConcurrencyLimiter:
    """Limits concurrent calls to one service; every call that `enter` admits ends with `leave`.

    Args:
        peer: the service's name in error messages, such as ``preprocess``.
        at_once: maximum number of concurrent calls.
        longest_s: maximum wait of a call, seconds.
    """

    def __init__(self, peer: str, at_once: int = AT_ONCE, longest_s: float = MAX_LINE_S) -> None:
        self._peer = peer
        self._free = at_once
        self._longest_s = longest_s
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self, most_s: float = inf) -> None:
        """Waits until a call may be made.

        Args:
            most_s: maximum wait of this caller, seconds; the limiter's own maximum applies if it is shorter.

        Raises:
            SluiceError: OVERLOADED when its turn does not come in time.
        """
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait([turn], timeout=min(most_s, self._longest_s))
        except asyncio.CancelledError:
            if turn.done():
                self.leave()
            raise
        finally:
            if not turn.done():
                self._waiting.remove(turn)
        if not turn.done():
            raise overloaded(f"Too many requests are waiting for the {self._peer} service; retry shortly.")

    def leave(self) -> None:
        """Ends a call: the one that has waited longest enters."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._free += 1
