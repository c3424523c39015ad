"""Distributes live view events to all open pages; each event is encoded once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from services.common.base.errors import overloaded, unavailable

MAX_PENDING = 5
"""Events that wait for one viewer; a slower one is sent the whole state instead."""


class Viewer:
    """One open page and its pending events."""

    def __init__(self) -> None:
        self._pending: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._needs_state = True
        self._closed = False

    def put(self, event: bytes) -> None:
        """Adds an event; for a viewer that reads too slowly, replaces all pending events by the whole state."""
        if len(self._pending) >= MAX_PENDING:
            self._pending.clear()
            self._needs_state = True
        elif not self._needs_state:
            self._pending.append(event)
        self._changed.set()

    def close(self) -> None:
        """Ends the stream."""
        self._closed = True
        self._changed.set()

    async def take(self, whole_state: Callable[[], bytes]) -> bytes:
        """Waits for events and returns them; returns nothing once closed."""
        while not self._closed:
            if self._needs_state:
                self._needs_state = False
                return whole_state()
            if self._pending:
                events = b"".join(self._pending)
                self._pending.clear()
                return events
            self._changed.clear()
            await self._changed.wait()
        return b""


class Feed:
    """Sends events to viewers.

    Args:
        max_viewers: maximum number of viewers.
        whole_state: returns the whole state as an event.
    """

    def __init__(self, max_viewers: int, whole_state: Callable[[], bytes]) -> None:
        self._max_viewers = max_viewers
        self._whole_state = whole_state
        self._viewers: set[Viewer] = set()
        self._closed = False

    @property
    def viewers(self) -> int:
        """Number of open pages."""
        return len(self._viewers)

    def publish(self, event: bytes) -> None:
        """Sends an event to all viewers."""
        for viewer in self._viewers:
            viewer.put(event)

    def join(self) -> AsyncIterator[bytes]:
        """Returns the events for a new viewer, starting with the whole state.

        Raises:
            SluiceError: OVERLOADED if there are too many viewers, UNAVAILABLE if the gateway is stopping.
        """
        if self._closed:
            raise unavailable("The gateway is stopping.", code="stopping")
        if len(self._viewers) >= self._max_viewers:
            raise overloaded(
                f"The live view is already open {len(self._viewers)} times, its limit; close one of the pages.",
                retry_after_ms=10_000,
            )
        return self._events()

    async def _events(self) -> AsyncIterator[bytes]:
        if self._closed or len(self._viewers) >= self._max_viewers:
            return  # another viewer joined since `join`
        viewer = Viewer()
        self._viewers.add(viewer)
        try:
            while event := await viewer.take(self._whole_state):
                yield event
        finally:
            self._viewers.discard(viewer)

    def close(self) -> None:
        """Ends all streams, so that the server can stop."""
        self._closed = True
        for viewer in self._viewers:
            viewer.close()
