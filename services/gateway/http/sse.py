"""Server-sent events: one response that several choices write to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import SluiceError
from services.gateway.http.errors import error_response
from services.gateway.http.inline_sender import InlineSender, abort, plain_send
from services.gateway.http.write_scheduler import WriteScheduler

log = logging.getLogger(__name__)

COMMENT = b": keep-alive\n\n"

T = TypeVar("T")


class EventSource(Protocol):
    """What fills an event stream."""

    def take(self) -> bytes:
        """Everything to be written now, as complete events; empty when there is nothing."""

    def cancel(self) -> None:
        """The client is gone."""

    @property
    def unsent(self) -> int:
        """How much waits to be taken, characters."""

    @property
    def over(self) -> bool:
        """Nothing comes after what `take` gives next."""

    @property
    def failure(self) -> SluiceError | None:
        """Why the source failed before it had anything to say; becomes a plain HTTP error."""


class EventStream(Response):
    """Streams a source to its client.

    The status line waits for the first event, so that what fails before it is an ordinary HTTP error; only when that
    takes so long that proxies would lose patience it goes out with a comment. Text of a slow client collects in its
    source, up to a bound; then, or when the client takes nothing for long, it is cut.

    Args:
        max_unsent: most characters that may wait for a client that does not read.

    Attributes:
        before_start: called with the response right before its headers go out; may still change them.
    """

    media_type = "text/event-stream"

    def __init__(
        self, source: EventSource, write_scheduler: WriteScheduler, max_unsent: int, headers: dict[str, str]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        # Starlette writes a length of 0 for the empty body; a stream has none.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._source: EventSource = source
        self._write_scheduler = write_scheduler
        self._max_unsent = max_unsent
        self._opened = asyncio.Event()
        self._done = asyncio.Event()
        self._sender: InlineSender | None = None
        self._asked = False
        self._ended = False
        self._cut = False
        self._quiet = False  # nothing was written since the last look
        self.before_start: Callable[[Response], None] = _as_it_is

    def notify(self, first: bool = False) -> None:
        """The source has something to write; the first of it goes out without waiting for a round."""
        self._opened.set()
        if self._sender is None:
            return
        if self._sender.blocked:
            if self._source.unsent > self._max_unsent:
                self.cut()
        elif first and not self._asked:
            self._write()
        elif not self._asked:
            self._asked = True
            self._write_scheduler.soon(self._round)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.get_running_loop().create_task(_wait_for_disconnect(receive))
        gone.add_done_callback(lambda task: self._end())
        silence = self._write_scheduler.silence
        silence.add(self)
        try:
            await self._opened.wait()
            failure = self._source.failure
            if failure is not None and not self._done.is_set():
                self._done.set()
                await error_response(failure)(scope, receive, send)
                return
            if not self._done.is_set():
                self.before_start(self)
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                self._sender = InlineSender(plain_send(scope, send), self._write, self._end)
                self._write()
                await self._done.wait()
        finally:
            silence.discard(self)
            gone.cancel()
            if self._cut:
                abort(scope)
            self.part()
            sender, self._sender = self._sender, None
            if sender is not None:
                await sender.close()

    def part(self) -> None:
        """Nothing more is told: source and stream, which know each other, let go and need no garbage collector."""
        self._source.cancel()
        self._source, self.before_start = _SILENCE, _as_it_is

    @property
    def blocked(self) -> bool:
        """The client has not taken what was sent last."""
        return self._sender is not None and self._sender.blocked

    def cut(self) -> None:
        """Gives the client up, with what it has not taken."""
        self._cut = True
        self._end()

    def reassure(self) -> None:
        """Says something when nothing was said since the last time, for proxies that close what is silent."""
        if not self._quiet:
            self._quiet = True
        elif self._sender is None:
            self._opened.set()
        elif not self._sender.blocked and not self._done.is_set() and not self._ended:
            self._sender.send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    def _end(self) -> None:
        self._done.set()
        self._opened.set()

    def _round(self) -> None:
        self._asked = False
        self._write()

    def _write(self) -> None:
        try:
            self._write_what_waits()
        except Exception:  # the caller also serves other streams
            log.exception("an event stream could not be written")
            self.cut()

    def _write_what_waits(self) -> None:
        if self._sender is None or self._sender.blocked or self._done.is_set():
            return
        if not self._ended:
            self._ended = self._source.over
            data = self._source.take()
            if not data and self._quiet and not self._ended:
                data = COMMENT
            self._quiet = False
            if data or self._ended:
                self._sender.send({"type": "http.response.body", "body": data, "more_body": not self._ended})
        if self._ended and not self._sender.blocked:
            self._done.set()


class _Silence:
    """The source of a stream that is over."""

    unsent = 0
    over = True
    failure = None

    def take(self) -> bytes:
        """Nothing."""
        return b""

    def cancel(self) -> None:
        """Does nothing."""


_SILENCE = _Silence()


def _as_it_is(response: Response) -> None:
    pass


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def result_unless_gone(receive: Receive, job: Coroutine[Any, Any, T]) -> T | None:
    """What a job answers; None, and the job is cancelled, when the client went away first."""
    working = asyncio.get_running_loop().create_task(job)
    gone = asyncio.get_running_loop().create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        del working  # what it raises holds this call, which must not hold it as well


async def run_unless_gone(receive: Receive, done: asyncio.Event, cancel: Callable[[], None]) -> bool:
    """Waits for `done`; False, after `cancel`, when the client went away first."""
    waiting = asyncio.get_running_loop().create_task(done.wait())
    gone = asyncio.get_running_loop().create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
        if done.is_set():
            return True
        cancel()
        return False
    finally:
        waiting.cancel()
        gone.cancel()
