"""The events of a background response, which clients read while it runs and after its end."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import SluiceError, invalid
from services.gateway.http.inline_sender import abort
from services.gateway.http.sse import COMMENT, result_unless_gone

_READ_BYTES = 64 << 10
PER_EVENT = 48
"""Approximate overhead of an event, bytes."""


class EventLog:
    """Events by their sequence numbers, of which the oldest are dropped.

    Args:
        max_bytes: most bytes of events.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._events: deque[bytes] = deque()
        self._first = 0  # sequence number of the oldest event
        self._changed = asyncio.Event()
        self.size = 0
        self.ended = False

    def add(self, data: bytes) -> None:
        """Adds complete events; comments are left out."""
        for event in data.split(b"\n\n"):
            if event and not event.startswith(b":"):
                self._events.append(event + b"\n\n")
                self.size += len(event) + 2 + PER_EVENT
        self.shrink(self._max_bytes)
        self._wake()

    def shrink(self, size: int) -> None:
        """Drops the oldest events until the rest takes at most `size` bytes."""
        while self.size > size and self._events:
            self.size -= len(self._events.popleft()) + PER_EVENT
            self._first += 1

    def end(self) -> None:
        """Marks the log as complete."""
        self.ended = True
        self._wake()

    def read(self, number: int) -> tuple[bytes, int]:
        """Returns some of the events from a sequence number on, and the number that follows them.

        Raises:
            SluiceError: INVALID_ARGUMENT if the first of them was dropped.
        """
        if number < self._first:
            raise invalid(
                f"The events up to {self._first - 1} are not stored any more; retrieve the response without stream.",
                param="starting_after",
                code="events_expired",
            )
        found: list[bytes] = []
        size = 0
        while size < _READ_BYTES and number < self._first + len(self._events):
            found.append(self._events[number - self._first])
            size += len(found[-1])
            number += 1
        return b"".join(found), number

    async def changed(self) -> None:
        """Waits until something is added, or the log ends."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class LoggedEvents(Response):
    """Sends the events of a log, from a sequence number on, until the log ends.

    Args:
        comment_every_s: longest time without output; 0 for no limit.
        write_s: longest time that the client may read nothing.

    Raises:
        SluiceError: as `EventLog.read`.
    """

    media_type = "text/event-stream"

    def __init__(self, events: EventLog, number: int, comment_every_s: float, write_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        events.read(number)
        self._log = events
        self._number = number
        self._comment_every_s = comment_every_s or None
        self._write_s = write_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            async with asyncio.timeout(self._write_s):
                await send({"type": "http.response.body", "body": data, "more_body": more})

        async def follow() -> None:
            while True:
                changed, ended = self._log.changed(), self._log.ended
                data, self._number = self._log.read(self._number)
                if data:
                    changed.close()
                    await write(data)
                elif ended:
                    changed.close()
                    await write(b"", more=False)
                    return
                else:
                    try:
                        await asyncio.wait_for(changed, self._comment_every_s)
                    except TimeoutError:
                        await write(COMMENT)

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await result_unless_gone(receive, follow())
        except (TimeoutError, SluiceError):  # the client reads too slowly
            abort(scope)
