"""Server-sent events: a streaming response that several choices write to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.http.connection import chunk_writer
from services.gateway.http.degradation import mark
from services.gateway.http.errors import error_response
from services.gateway.http.inline_sender import InlineSender, abort, raw_send
from services.gateway.http.write_scheduler import WriteScheduler
from services.gateway.operations.operation import EventListener, EventSource, Marked
from services.gateway.operations.output import COMMENT

log = logging.getLogger(__name__)

_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
CLIENT_CLOSED_REQUEST = 499
"""HTTP status of a response whose client disconnected before its head was sent."""


class EventStream(Response):
    """Sends the events of a source to one client.

    The status line is sent with the first event, so that earlier failures are ordinary HTTP errors; if that takes
    longer than proxies wait, it is sent with what the source says of its silence. The source buffers text for a slow
    client. The client is disconnected when the buffer exceeds its limit or the client reads nothing for the write
    timeout.

    Args:
        max_unsent: maximum number of buffered characters.
        marked: fallbacks and migrations that the headers report, as of when they are sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: EventSource,
        write_scheduler: WriteScheduler,
        max_unsent: int,
        marked: Iterable[Marked] = (),
        media_type: str = media_type,
    ) -> None:
        super().__init__(media_type=media_type)
        self._source: EventSource = source
        self._write_scheduler = write_scheduler
        self._max_unsent = max_unsent
        self._opened = asyncio.Event()
        self._completed = asyncio.Event()
        self._sender: InlineSender | None = None
        self._scheduled = False
        self._last_sent = False
        self._aborted = False
        self._idle = False  # nothing was written since the last keep-alive check
        self._marked = marked
        source.attach(self)

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Sets the headers of a stream, whose length is unknown."""
        charset = "; charset=utf-8" if str(self.media_type).startswith("text/") else ""
        self.raw_headers = [*_HEADERS, (b"content-type", f"{self.media_type}{charset}".encode())]

    def notify(self, first: bool = False) -> None:
        """Schedules a write; the first event of a choice is written immediately."""
        self._opened.set()
        if self._sender is None:
            return
        if self._sender.blocked:
            if self._source.unsent > self._max_unsent:
                self.cut()
        elif first and not self._scheduled:
            self._write()
        elif not self._scheduled:
            self._scheduled = True
            self._write_scheduler.soon(self._scheduled_write)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnect = asyncio.get_running_loop().create_task(wait_for_disconnect(receive))
        disconnect.add_done_callback(lambda task: self._end())
        keepalive = self._write_scheduler.keepalive
        keepalive.add(self)
        try:
            await self._opened.wait()
            failure = self._source.failure
            if failure is not None and not self._completed.is_set():
                self._completed.set()
                await error_response(failure)(scope, receive, send)
                return
            if self._completed.is_set():
                # The client has disconnected; what observes responses learns how this one ended.
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
            else:
                mark(self, self._marked)
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                raw = raw_send(scope, send)
                self._sender = InlineSender(raw, chunk_writer(raw), self._write, self._end)
                self._write()
                await self._completed.wait()
        finally:
            keepalive.discard(self)
            disconnect.cancel()
            if self._aborted:
                abort(scope)
            self.part()
            sender, self._sender = self._sender, None
            if sender is not None:
                await sender.close()

    def part(self) -> None:
        """Cancels the source and breaks the reference cycle between source and stream."""
        self._source.cancel()
        self._source, self._marked = _EMPTY_SOURCE, ()

    @property
    def blocked(self) -> bool:
        """Whether the last message is still being sent."""
        return self._sender is not None and self._sender.blocked

    def cut(self) -> None:
        """Disconnects the client and discards pending data."""
        self._aborted = True
        self._end()

    def keep_alive(self) -> None:
        """Shows that the stream is alive if nothing was written since the last call.

        Proxies close idle connections, and some clients give up when they have received no event for a time.
        """
        if not self._idle:
            self._idle = True
        elif self._sender is None:
            self._opened.set()
        elif not self._sender.blocked and not self._completed.is_set() and not self._last_sent:
            self._sender.send_chunk(self._source.silence())

    def _end(self) -> None:
        self._completed.set()
        self._opened.set()

    def _scheduled_write(self) -> None:
        self._scheduled = False
        self._write()

    def _write(self) -> None:
        try:
            self._write_pending()
        except Exception:  # the caller also serves other streams
            log.exception("failed to write an event stream; the client is disconnected")
            self.cut()

    def _write_pending(self) -> None:
        if self._sender is None or self._sender.blocked or self._completed.is_set():
            return
        if not self._last_sent:
            self._last_sent = self._source.over
            data = self._source.take()
            if not data and self._idle and not self._last_sent:
                data = self._source.silence()
            self._idle = False
            if self._last_sent:
                self._sender.send({"type": "http.response.body", "body": data, "more_body": False})
            elif data:
                self._sender.send_chunk(data)
        if self._last_sent and not self._sender.blocked:
            self._completed.set()


class _EmptySource:
    """Replaces the source of a closed stream."""

    unsent = 0
    over = True
    failure = None

    def attach(self, listener: EventListener) -> None:
        """Does nothing."""

    def take(self) -> bytes:
        """Returns nothing."""
        return b""

    def silence(self) -> bytes:
        """Returns a comment."""
        return COMMENT

    def cancel(self) -> None:
        """Does nothing."""


_EMPTY_SOURCE = _EmptySource()


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
