"""Limits on what a peer may do that costs it less than the server."""

from __future__ import annotations

import time

from services.router.picker.http2.frames import BrokenConnection, ErrorCode

MOST_CONTROL = 2_000
CONTROL_PER_S = 500.0
"""PING, SETTINGS, PRIORITY and other frames without a purpose of their own: so many at once, then so many a second."""
MOST_UNSERVED = 1_000
"""Streams in a row that the peer may reset before anything is sent on one of them."""


class FrameGuard:
    """Counts what one peer does; its methods raise BrokenConnection beyond the limits."""

    def __init__(self) -> None:
        self._left = float(MOST_CONTROL)
        self._at = time.monotonic()
        self._unserved = 0

    def control(self, weight: float = 1.0) -> None:
        """Counts a frame that only asks for an answer, or for nothing.

        Args:
            weight: what it costs, as a multiple of a PING.
        """
        self._left -= weight
        if self._left >= 0:
            return
        now = time.monotonic()
        self._left = min(self._left + (now - self._at) * CONTROL_PER_S, MOST_CONTROL)
        self._at = now
        if self._left < 0:
            raise BrokenConnection(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that carry nothing")

    def reset(self, served: bool) -> None:
        """Counts a stream that the peer resets.

        Args:
            served: something has been sent on it.
        """
        self._unserved = 0 if served else self._unserved + 1
        if self._unserved > MOST_UNSERVED:
            raise BrokenConnection(ErrorCode.ENHANCE_YOUR_CALM, "too many streams are reset before they are served")
