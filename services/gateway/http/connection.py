"""uvicorn's HTTP/1.1 connection, with bounds: on headers, on the time they take, on what is read ahead, on connections,
and on goodbyes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.budgets import Budget
from services.gateway.http.bounded_reader import READ_BYTES, BoundedReader, PausedFlowControl
from services.gateway.http.inline_sender import ABORT_KEY

LINGER_S = 1.0
MOST_HEADERS = 128
BODY_AHEAD_BYTES = 32 << 10
"""A body of which this much waits to be taken by the application is not read further."""

CHUNKED_SLICE = 8 << 10
"""Bytes of a chunked body that are parsed in one turn of the loop: the chunks may be tiny, and each costs a call."""

_END_OF_HEAD = b"\r\n\r\n"


def _default_pipelined() -> Budget:
    return Budget("pipelined_requests", 4, "--max-pipelined-requests")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one connection may do; see HttpSettings.

    Attributes:
        body_timeout_s: longest that the rest of a body may take to arrive when its request was answered already.
        pipelined: requests that are read ahead of the one being answered.
    """

    connections: int = 16_384
    header_bytes: int = 32 << 10
    header_timeout_s: float = 15.0
    body_timeout_s: float = 30.0
    pipelined: Budget = field(default_factory=_default_pipelined)


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection.

    Clients that dawdle over headers are closed, so are connections over the bound. When the server stops, a connection
    that is idle stays open for a moment: a request that is on its way just then is answered, and told that it was the
    last one.

    Requests are parsed one after the other: the next one when the one before it has been answered. What was received
    of it by then is kept as bytes, and when that is more than a few small requests the connection is not read.
    """

    bounds: ClassVar[Bounds] = Bounds()
    server_stops: ClassVar[bool] = False
    flow: PausedFlowControl

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._unparsed = b""
        self._framing_bytes = 0  # since the last body byte or the end of the last request
        self._trailers = 0
        self._headers_due: asyncio.TimerHandle | None = None
        self._close_due: asyncio.TimerHandle | None = None
        self._in_message = False
        self._in_body = False
        self._body_left: int | None = 0  # bytes; None: chunked
        self._stopped = False  # nothing more is parsed
        self._counted_ahead = False
        self._leaving = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = PausedFlowControl(transport)
        transport.set_protocol(BoundedReader(self))
        if hasattr(transport, "set_read_buffer_limits"):  # TLS: what has arrived and is not decrypted
            transport.set_read_buffer_limits(READ_BYTES)
        if len(self.connections) > self.bounds.connections:
            self._refuse(503, "The gateway has too many connections; try again soon.")
            return
        self._await_request()
        if self.server_stops:  # it was accepted before that, or its handshake took longer
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        self._cancel_close()
        self._unparsed = b""
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._stopped:
            self._unparsed += data
            self._parse()

    def _parse(self) -> None:
        """Parses what was received up to the end of the request that is under way, or of the next one."""
        while self._unparsed and self._may_parse():
            part = self._take_part()
            if not part:
                break
            if not self._in_message and self._headers_due is None and not part.endswith(_END_OF_HEAD):
                self._await_headers()
            self._framing_bytes += len(part)
            if not self._in_body and self._framing_bytes > self.bounds.header_bytes:
                self._refuse_headers()
                break
            super().data_received(part)
            if self._framing_bytes > self.bounds.header_bytes:  # a chunk's head or a trailer that does not end
                self._refuse_headers()
            if self._unparsed and self._in_chunks:
                self.loop.call_soon(self._parse)  # after other connections
                break
        self._read_ahead()

    @property
    def _in_chunks(self) -> bool:
        return self._in_body and self._body_left is None

    def _may_parse(self) -> bool:
        if self._stopped or self.transport.is_closing():
            return False
        return self._in_message or self.cycle is None or self.cycle.response_complete

    def _take_part(self) -> bytes:
        """Takes from what is unparsed as much as surely belongs to one request."""
        waiting = self._unparsed
        if not self._in_body:
            found = waiting.find(_END_OF_HEAD)
            end = len(waiting) - _begun_end(waiting) if found < 0 else found + len(_END_OF_HEAD)
        elif self._body_left is None:  # chunked: only the parser can tell where it ends
            end = min(CHUNKED_SLICE, len(waiting))
        else:
            end = min(self._body_left, len(waiting))
        self._unparsed = waiting[end:]
        return waiting[:end]

    def _read_ahead(self) -> None:
        """Reads on, unless enough was received for now."""
        if self._may_parse():
            if self._unparsed and self._in_chunks:
                self.flow.hold()
            elif self._in_body and self.cycle.response_complete:
                self.flow.hold()  # nothing waits for the rest: it is read once in a turn of the loop
                self.loop.call_soon(self.flow.release, True)
            elif self.flow.held:
                self.flow.release(read=not self._in_body or len(self.cycle.body) <= BODY_AHEAD_BYTES)
        elif self._unparsed and not self.flow.held:
            requests = self._unparsed.count(_END_OF_HEAD)
            if requests > self.bounds.pipelined.limit or len(self._unparsed) > READ_BYTES:
                self._hold()

    def _hold(self) -> None:
        self.flow.hold()
        if not self._counted_ahead:
            self._counted_ahead = True
            self.bounds.pipelined.count()

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # It came in one read with the end of a chunked body. It is forgotten, and the client can see that from the
            # end of the connection after the answer to the request before it.
            self._stop_parsing()
            self._hold()
            self.cycle.keep_alive = False
            return
        super().on_message_begin()
        self._in_message = True
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[ABORT_KEY] = self.transport.abort

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._stopped:
            return
        if self._in_body:  # a trailer of a chunked body: dropped, because no proxy has looked at it
            self._trailers += 1
            if self._trailers > MOST_HEADERS:
                self._refuse_headers()
            return
        super().on_header(name, value)
        if len(self.headers) > MOST_HEADERS:
            self._refuse_headers()

    def on_headers_complete(self) -> None:
        if self._stopped:
            return
        self._headers_came()
        self._framing_bytes = self._trailers = 0
        self._in_body, self._body_left = True, 0
        for name, value in self.headers:
            if name == b"content-length":
                self._body_left = int(value)
            elif name == b"transfer-encoding":
                self._body_left = None
                break
        super().on_headers_complete()
        if self._leaving and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if self._stopped:
            return
        self._framing_bytes = 0
        if self._body_left is not None:
            self._body_left -= len(body)
        super().on_body(body)
        if len(self.cycle.body) > BODY_AHEAD_BYTES:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if self._stopped:
            return
        self._in_message = self._in_body = False
        self._framing_bytes = 0
        super().on_message_complete()
        if self._close_due is not None:
            self._cancel_close()
            self._await_request()

    def send_400_response(self, msg: str) -> None:
        if not self._stopped:
            self._refuse(400, "This is no valid HTTP request.")

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection; aborts it if the last response is still unsent."""
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
        self.cycle.body = bytearray()  # what the application did not want
        if self._in_message:
            self._close_soon(self.bounds.body_timeout_s)
        elif self.transport.is_closing():
            self._close_soon(self.timeout_keep_alive)  # its client may never take the rest of the answer
        elif self._unparsed:
            self.loop.call_soon(self._parse)
        if self._leaving:
            self.loop.call_later(LINGER_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _await_request(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _close_soon(self, seconds: float) -> None:
        self._cancel_close()
        self._close_due = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_close(self) -> None:
        if self._close_due is not None:
            self._close_due.cancel()
            self._close_due = None

    def _stop_parsing(self) -> None:
        self._stopped = True
        self._unparsed = b""

    def _refuse_headers(self) -> None:
        self._refuse(431, f"Headers are bounded to {self.bounds.header_bytes} bytes and {MOST_HEADERS} lines.")

    def _await_headers(self) -> None:
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
        if self._stopped:
            return
        self._stop_parsing()
        self._headers_came()
        self._unset_keepalive_if_required()
        answering = self.cycle is not None and not self.cycle.response_complete
        if not answering or not self.cycle.response_started:
            self.transport.write(_refusal(status, message))
        if answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._end(linger=status != 503)

    def _end(self, linger: bool) -> None:
        """Closes the connection.

        Args:
            linger: reads for a moment what the client is sending: closed before that, the connection would be reset,
                and its client might never see the answer.
        """
        if linger and not self.transport.is_closing() and self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.release(read=True)
            self._close_soon(LINGER_S)
        else:
            self.transport.close()


def _refusal(status: int, message: str) -> bytes:
    kind = "invalid_request_error" if status < 500 else "service_unavailable_error"
    body = orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}})
    retry = b"retry-after: 1\r\n" if status == 503 else b""
    head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    return head % (status, _PHRASES[status], len(body)) + retry + b"connection: close\r\n\r\n" + body


_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


def _begun_end(data: bytes) -> int:
    """Returns how many bytes at the end of `data` may be the beginning of an end of headers."""
    for size in (3, 2, 1):
        if data.endswith(_END_OF_HEAD[:size]):
            return size
    return 0
