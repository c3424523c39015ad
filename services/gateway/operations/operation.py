"""What an operation is: it answers the body of a request, and knows of no transport.

A transport (JSON, server-sent events, WebSocket, background, batch) reads a body, passes it to an operation with the
caller it came from, and delivers the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.common.base.errors import SluiceError
from services.gateway.core.receipts import Receipt


class Marked(Protocol):
    """A generation that may have used fallbacks or moved between workers."""

    @property
    def degraded(self) -> Collection[str]: ...

    @property
    def migrations(self) -> int: ...

    @property
    def receipts(self) -> Sequence[Receipt]: ...


@dataclass(frozen=True, slots=True)
class Fallback:
    """Holds fallbacks that the API layer itself applied; see Marked."""

    degraded: set[str]
    migrations: int = 0
    receipts: tuple[Receipt, ...] = ()


async def never_gone() -> None:
    """The `gone` of a caller that cannot leave: never returns."""
    await asyncio.get_running_loop().create_future()


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    Attributes:
        headers: those of the request, by lower-case name; empty where the transport has none.
        gone: returns once the caller has disconnected or cancelled; may be called several times.
        request_id: id of the request in the response's headers; empty where there are none.
        connection: what the transport keeps between the requests of one connection; None without it.
    """

    headers: Mapping[str, str]
    gone: Callable[[], Awaitable[None]] = never_gone
    request_id: str = ""
    connection: Any = None


NO_CALLER = Caller({})


class EventListener(Protocol):
    """Delivers the events of a source."""

    def notify(self, first: bool = False) -> None:
        """Schedules the delivery of pending events; the first event of a choice is delivered immediately."""

    def cut(self) -> None:
        """Disconnects the caller and discards pending events."""


class EventSource(Protocol):
    """Produces the events of a stream."""

    def attach(self, listener: EventListener) -> None:
        """Sets what delivers the events; it is notified at once if events are pending."""

    def take(self) -> bytes:
        """Removes and returns all pending complete events; empty if there are none."""

    def silence(self) -> bytes:
        """Returns what shows a caller that the stream is alive while there is nothing to send."""

    def cancel(self) -> None:
        """Stops the source, because its caller disconnected or the response ended."""

    @property
    def unsent(self) -> int:
        """Number of pending characters."""

    @property
    def over(self) -> bool:
        """Whether the next `take` returns the last events."""

    @property
    def failure(self) -> SluiceError | None:
        """Error of a source that failed before its first event, which transports report as of the request."""


class Unattached:
    """The listener of a source until a transport attaches one: remembers that it was notified."""

    __slots__ = ("notified",)

    def __init__(self) -> None:
        self.notified = False

    def notify(self, first: bool = False) -> None:
        """See EventListener."""
        self.notified = True

    def cut(self) -> None:
        """See EventListener; no caller is connected yet."""


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer in one piece.

    Attributes:
        content: a JSON object.
        marked: generations and fallbacks that the transport reports beside the content.
    """

    content: dict[str, Any]
    marked: Iterable[Marked] = ()


EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Streamed:
    """An answer as a stream of events; see Whole.

    Attributes:
        media_type: of the events, over HTTP.
    """

    source: EventSource
    marked: Iterable[Marked] = ()
    media_type: str = EVENT_STREAM


@dataclass(frozen=True, slots=True)
class Detached:
    """An answer that is delivered while the work goes on, even without its caller.

    The work is part of the request for admission, limits and the shutdown of the gateway.
    """

    answer: Whole | Streamed
    work: Callable[[], Awaitable[None]]


Answer = Whole | Streamed | Detached
Operation = Callable[[dict[str, Any], Caller], Awaitable[Answer | None]]
"""Answers a parsed body; None if the caller has gone. Raises SluiceError with fields named as in the caller's API."""
