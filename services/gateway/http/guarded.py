"""uvicorn's HTTP/1.1 connection, with bounds: on headers, on the time they take, on connections, and on goodbyes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.http.direct import ABORT_KEY

LINGER_S = 1.0
MOST_HEADERS = 128
_BYTES_OF_HEADER = 4  # ": " and the end of the line


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one connection may do; see HttpSettings."""

    connections: int = 16_384
    header_bytes: int = 32 << 10
    header_timeout_s: float = 15.0


class GuardedProtocol(HttpToolsProtocol):
    """One connection.

    Clients that dawdle over headers are closed, so are connections over the bound. When the server stops, a connection
    that is idle stays open for a moment: a request that is on its way just then is answered, and told that it was the
    last one.
    """

    bounds: ClassVar[Bounds] = Bounds()
    server_stops: ClassVar[bool] = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._header_bytes = 0
        self._unparsed_bytes = 0
        self._headers_due: asyncio.TimerHandle | None = None
        self._in_message = False
        self._leaving = False
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            self._refuse(503, "The gateway has too many connections; try again soon.")
            return
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        if self.server_stops:  # it was accepted before that, or its handshake took longer
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        # A body that is still on its way after its request was refused is no beginning of another request.
        between = not self._in_message and (self.cycle is None or self.cycle.response_complete)
        if self._headers_due is None and between:
            self._await_headers()
        super().data_received(data)
        if self._headers_due is not None:  # of a line that has no end yet the parser says nothing
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > self.bounds.header_bytes:
                self._refuse_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        self._header_bytes = 0
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[ABORT_KEY] = self.transport.abort

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + _BYTES_OF_HEADER)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_came()
        if self._refused:
            return
        super().on_headers_complete()
        if self._leaving and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            self._refuse(400, "This is no valid HTTP request.")

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came for long; whoever has not taken the last answer by now never will."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """The server stops: what runs may finish, and what is on its way is still answered."""
        self._leaving = True
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(LINGER_S, self._close_if_idle)
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False
        # Else its client was told that the connection stays, and may send the next request on it right after the end.

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._leaving:
            self.loop.call_later(LINGER_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _count(self, more: int) -> None:
        self._header_bytes += more
        if self._header_bytes > self.bounds.header_bytes or len(self.headers) >= MOST_HEADERS:
            self._refuse_headers()

    def _refuse_headers(self) -> None:
        self._refuse(431, f"Headers are bounded to {self.bounds.header_bytes} bytes and {MOST_HEADERS} lines.")

    def _await_headers(self) -> None:
        self._unparsed_bytes = 0
        self._headers_due = self.loop.call_later(self.bounds.header_timeout_s, self._too_slow)

    def _headers_came(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _too_slow(self) -> None:
        self._headers_due = None
        self._refuse(408, f"The headers did not arrive within {self.bounds.header_timeout_s:g} s.")

    def _refuse(self, status: int, message: str) -> None:
        """Answers without the application, and closes."""
        if self._refused:
            return
        self._refused = True
        self._headers_came()
        kind = "invalid_request_error" if status < 500 else "service_unavailable_error"
        body = orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}})
        retry = b"retry-after: 1\r\n" if status == 503 else b""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                % (status, _PHRASES[status], len(body))
                + retry
                + b"connection: close\r\n\r\n"
                + body
            )
        self.transport.close()


_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}
