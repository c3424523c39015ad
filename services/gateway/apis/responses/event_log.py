"""The events of a background response, which clients read while it runs and after its end."""

from __future__ import annotations

from collections import deque

from services.common.base.errors import SluiceError, invalid
from services.gateway.operations.operation import EventListener, Unattached
from services.gateway.operations.output import COMMENT

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
        self._listeners: set[EventListener] = set()
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
        while size < _READ_BYTES and number < self.end_number:
            found.append(self._events[number - self._first])
            size += len(found[-1])
            number += 1
        return b"".join(found), number

    @property
    def end_number(self) -> int:
        """The sequence number of the next event."""
        return self._first + len(self._events)

    def follow(self, listener: EventListener) -> None:
        """Notifies a listener of additions and of the end."""
        self._listeners.add(listener)

    def unfollow(self, listener: EventListener) -> None:
        """Notifies a listener no longer."""
        self._listeners.discard(listener)

    def _wake(self) -> None:
        for listener in tuple(self._listeners):
            listener.notify(first=True)


class LoggedEvents:
    """The events of a log, from a sequence number on, until the log ends; see EventSource.

    Raises:
        SluiceError: as `EventLog.read`.
    """

    unsent = 0  # the log holds them, within bounds of its own
    failure = None

    def __init__(self, events: EventLog, number: int) -> None:
        events.read(number)
        self._log = events
        self._number = number
        self._listener: EventListener = Unattached()

    @property
    def over(self) -> bool:
        """See EventSource."""
        return self._log.ended and self._number >= self._log.end_number

    def attach(self, listener: EventListener) -> None:
        """See EventSource."""
        self._listener = listener
        self._log.follow(listener)
        if self._log.ended or self._number < self._log.end_number:
            listener.notify(first=True)

    def take(self) -> bytes:
        """See EventSource; disconnects a client that reads more slowly than the log drops events."""
        try:
            events, self._number = self._log.read(self._number)
        except SluiceError:
            self._listener.cut()
            return b""
        if events and (self._log.ended or self._number < self._log.end_number):
            self._listener.notify()
        return events

    def silence(self) -> bytes:
        """See EventSource."""
        return COMMENT

    def cancel(self) -> None:
        """See EventSource."""
        self._log.unfollow(self._listener)
