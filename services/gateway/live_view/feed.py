"""The compact stream: what changed in the last second, written once for everybody who looks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from services.common.errors import overloaded, unavailable

STALE_ROUTER_CODES = 5
"""Deltas that may wait for a slow viewer; then it gets the whole state instead."""


class Viewer:
    """One open page: what waits to be sent to it."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._news = asyncio.Event()
        self.behind = True
        self.over = False

    def put(self, event: bytes) -> None:
        """One more event; a viewer that does not read loses those that wait and starts afresh."""
        if self.behind:
            self._news.set()
        elif len(self._waiting) >= STALE_ROUTER_CODES:
            self._waiting.clear()
            self.behind = True
        else:
            self._waiting.append(event)
            self._news.set()

    def end(self) -> None:
        """Nothing comes any more."""
        self.over = True
        self._news.set()

    async def take(self, whole: Callable[[], bytes]) -> bytes:
        """What to send next, empty at the end; `whole` returns the complete state for a new viewer."""
        while not self.over:
            if self.behind:
                self.behind = False
                return whole()
            if self._waiting:
                sent = b"".join(self._waiting)
                self._waiting.clear()
                return sent
            self._news.clear()
            await self._news.wait()
        return b""


class Feed:
    """Hands events to viewers.

    Args:
        most_viewers: more are refused.
        whole: the whole state as an event.
    """

    def __init__(self, most_viewers: int, whole: Callable[[], bytes]) -> None:
        self._most = most_viewers
        self._whole = whole
        self._viewers: set[Viewer] = set()
        self._closed = False

    @property
    def viewers(self) -> int:
        """Open pages."""
        return len(self._viewers)

    def publish(self, event: bytes) -> None:
        """Gives an event to everybody."""
        for viewer in self._viewers:
            viewer.put(event)

    def join(self) -> AsyncIterator[bytes]:
        """A viewer's events, beginning with the whole state.

        Raises:
            SluiceError: OVERLOADED when there are too many viewers, UNAVAILABLE when the gateway stops.
        """
        if self._closed:
            raise unavailable("The gateway is stopping.", code="stopping")
        if len(self._viewers) >= self._most:
            raise overloaded(
                f"{len(self._viewers)} pages look at this gateway already, its limit (--ui-viewers).",
                retry_after_ms=10_000,
            )
        return self._events()

    async def _events(self) -> AsyncIterator[bytes]:
        if self._closed or len(self._viewers) >= self._most:
            return  # another viewer connected in between
        viewer = Viewer()
        self._viewers.add(viewer)
        try:
            while event := await viewer.take(self._whole):
                yield event
        finally:
            self._viewers.discard(viewer)

    def close(self) -> None:
        """Ends every stream, so that none keeps the server from stopping."""
        self._closed = True
        for viewer in self._viewers:
            viewer.end()
