"""uvicorn's HTTP/1.1 protocol with bounds on headers and their arrival time, read-ahead, connections and closing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.common.budgets import Budget
from services.gateway.http.bounded_reader import READ_BYTES, BoundedReader, PausedFlowControl
from services.gateway.http.inline_sender import ABORT_KEY

LINGER_S = 1.0
MAX_HEADERS = 128
BODY_AHEAD_BYTES = 32 << 10
"""Unread bytes of a body at which the connection is paused."""
CHUNKED_SLICE = 8 << 10
"""Bytes of a chunked body parsed per event loop iteration: chunks may be tiny, and each costs a callback."""

_END_OF_HEAD = b"\r\n\r\n"


def _default_pipelined() -> Budget:
    return Budget("pipelined_requests", 4, "--max-pipelined-requests")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on connections; see HttpSettings.

    Attributes:
        body_timeout_s: longest wait for the rest of a body after the response to its request is complete.
        pipelined: bounds the requests read ahead of the current one.
        socket_paths: paths that are served over WebSocket.
    """

    connections: int = 16_384
    header_bytes: int = 32 << 10
    header_timeout_s: float = 15.0
    body_timeout_s: float = 30.0
    pipelined: Budget = field(default_factory=_default_pipelined)
    socket_paths: frozenset[bytes] = frozenset()


class BoundedHttpProtocol(HttpToolsProtocol):
    """Serves one connection.

    Closes connections beyond the limit and those whose headers arrive too slowly. When the server stops, idle
    connections stay open for `LINGER_S`, so that a request already in transit gets a response with `connection: close`.

    Parses the next request only after the response to the current one. Until then pipelined requests stay unparsed, and
    the connection is paused when they exceed the bounds.
    """

    bounds: ClassVar[Bounds] = Bounds()
    server_stops: ClassVar[bool] = False
    flow: PausedFlowControl

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._unparsed = b""
        self._framing_bytes = 0  # received since the last body byte or the end of the last request
        self._trailers = 0
        self._headers_due: asyncio.TimerHandle | None = None
        self._close_due: asyncio.TimerHandle | None = None
        self._in_message = False
        self._in_body = False
        self._body_left: int | None = 0  # bytes; None: chunked
        self._parsing_stopped = False
        self._pipelining_counted = False
        self._closing = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = PausedFlowControl(transport)
        transport.set_protocol(BoundedReader(self))
        if hasattr(transport, "set_read_buffer_limits"):  # TLS: bounds received data that is not decrypted yet
            transport.set_read_buffer_limits(READ_BYTES)
        if len(self.connections) > self.bounds.connections:
            self._refuse(503, "The gateway has too many open connections; try again soon.")
            return
        self._start_keep_alive_timeout()
        if self.server_stops:  # accepted before, or its TLS handshake ended after
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timeout()
        self._cancel_close()
        self._unparsed = b""
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._parsing_stopped:
            self._unparsed += data
            self._parse()

    def _parse(self) -> None:
        """Parses received bytes up to the end of the current request, or else of the next one."""
        while self._unparsed and self._may_parse():
            data = self._take_unparsed()
            if not data:
                break
            if not self._in_message and self._headers_due is None and not data.endswith(_END_OF_HEAD):
                self._start_header_timeout()
            self._framing_bytes += len(data)
            if not self._in_body and self._framing_bytes > self.bounds.header_bytes:
                self._refuse_headers()
                break
            super().data_received(data)
            if self._framing_bytes > self.bounds.header_bytes:  # an endless chunk header or trailer
                self._refuse_headers()
            if self._unparsed and self._in_chunks:
                self.loop.call_soon(self._parse)  # lets other connections proceed first
                break
        self._read_ahead()

    @property
    def _in_chunks(self) -> bool:
        return self._in_body and self._body_left is None

    def _may_parse(self) -> bool:
        if self._parsing_stopped or self.transport.is_closing():
            return False
        return self._in_message or self.cycle is None or self.cycle.response_complete

    def _take_unparsed(self) -> bytes:
        """Removes and returns unparsed bytes that certainly belong to a single request."""
        data = self._unparsed
        if not self._in_body:
            index = data.find(_END_OF_HEAD)
            end = len(data) - _partial_terminator(data) if index < 0 else index + len(_END_OF_HEAD)
        elif self._body_left is None:  # chunked: only the parser finds the end
            end = min(CHUNKED_SLICE, len(data))
        else:
            end = min(self._body_left, len(data))
        self._unparsed = data[end:]
        return data[:end]

    def _read_ahead(self) -> None:
        """Resumes reading, or pauses it if enough was received for now."""
        if self._may_parse():
            if self._unparsed and self._in_chunks:
                self.flow.hold()
            elif self._in_body and self.cycle.response_complete:
                self.flow.hold()  # the rest is discarded: one read per event loop iteration
                self.loop.call_soon(self.flow.release, True)
            elif self.flow.held:
                self.flow.release(read=not self._in_body or len(self.cycle.body) <= BODY_AHEAD_BYTES)
        elif self._unparsed and not self.flow.held:
            requests = self._unparsed.count(_END_OF_HEAD)
            if requests > self.bounds.pipelined.limit or len(self._unparsed) > READ_BYTES:
                self._hold()

    def _hold(self) -> None:
        self.flow.hold()
        if not self._pipelining_counted:
            self._pipelining_counted = True
            self.bounds.pipelined.count()

    def _should_upgrade(self) -> bool:
        """Whether the request opens a WebSocket; upgrades of other paths and protocols are ordinary requests."""
        if not self.bounds.socket_paths or not super()._should_upgrade():
            return False
        hosts = [value for name, value in self.headers if name == b"host"]
        path = self.url.partition(b"?")[0]
        return path in self.bounds.socket_paths and self.url.isascii() and len(hosts) == 1 and _is_name(hosts[0])

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: clients may offer any upgrade."""

    def handle_websocket_upgrade(self) -> None:
        """Hands the connection over to the WebSocket protocol."""
        if self._unparsed:
            self._refuse(400, "Data followed the WebSocket handshake before its response; wait for the response.")
            return
        self._cancel_header_timeout()
        self._cancel_close()
        super().handle_websocket_upgrade()
        protocol: Any = self.transport.get_protocol()
        self.transport.set_protocol(BoundedReader(protocol))
        if self._closing or self.server_stops:
            protocol.shutdown()

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # Arrived in one read with the end of a chunked body. It is dropped, which the client detects because the
            # connection closes after the response to the previous request.
            self._stop_parsing()
            self._hold()
            self.cycle.keep_alive = False
            return
        super().on_message_begin()
        self._in_message = True
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[ABORT_KEY] = self.transport.abort

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._parsing_stopped:
            return
        if self._in_body:  # trailers of chunked bodies are dropped, because proxies do not check them
            self._trailers += 1
            if self._trailers > MAX_HEADERS:
                self._refuse_headers()
            return
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse_headers()

    def on_headers_complete(self) -> None:
        if self._parsing_stopped:
            return
        self._cancel_header_timeout()
        self._framing_bytes = self._trailers = 0
        self._in_body, self._body_left = True, 0
        for name, value in self.headers:
            if name == b"content-length":
                self._body_left = int(value)
            elif name == b"transfer-encoding":
                self._body_left = None
                break
        super().on_headers_complete()
        if self._closing and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if self._parsing_stopped:
            return
        self._framing_bytes = 0
        if self._body_left is not None:
            self._body_left -= len(body)
        super().on_body(body)
        if len(self.cycle.body) > BODY_AHEAD_BYTES:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if self._parsing_stopped:
            return
        self._in_message = self._in_body = False
        self._framing_bytes = 0
        super().on_message_complete()
        if self._close_due is not None:
            self._cancel_close()
            self._start_keep_alive_timeout()

    def send_400_response(self, msg: str) -> None:
        if not self._parsing_stopped:
            self._refuse(400, "This is not a valid HTTP request; check the request line and headers.")

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection; one whose client has not read the last response is aborted."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """Closes the connection once its requests are complete, including those already in transit."""
        self._closing = True
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(LINGER_S, self._close_if_idle)
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False
        # A response that has started promised keep-alive, so its client may still send another request.

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.cycle.body = bytearray()  # not read by the application
        if self._in_message:
            self._close_soon(self.bounds.body_timeout_s)
        elif self.transport.is_closing():
            self._close_soon(self.timeout_keep_alive)  # the client may never read the rest of the response
        elif self._unparsed or self.flow.held:  # held since the end of a chunked body
            self.loop.call_soon(self._parse)
        if self._closing:
            self.loop.call_later(LINGER_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _start_keep_alive_timeout(self) -> None:
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
        self._parsing_stopped = True
        self._unparsed = b""

    def _refuse_headers(self) -> None:
        limits = f"{self.bounds.header_bytes} bytes or {MAX_HEADERS} lines"
        self._refuse(431, f"The headers exceed {limits}; send fewer or shorter ones.")

    def _start_header_timeout(self) -> None:
        self._headers_due = self.loop.call_later(self.bounds.header_timeout_s, self._refuse_late_headers)

    def _cancel_header_timeout(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _refuse_late_headers(self) -> None:
        self._headers_due = None
        self._refuse(408, f"The headers did not arrive within {self.bounds.header_timeout_s:g} s; send them at once.")

    def _refuse(self, status: int, message: str) -> None:
        """Sends an error response without calling the application, and closes the connection."""
        if self._parsing_stopped:
            return
        self._stop_parsing()
        self._cancel_header_timeout()
        self._unset_keepalive_if_required()
        responding = self.cycle is not None and not self.cycle.response_complete
        if not responding or not self.cycle.response_started:
            self.transport.write(_error_response(status, message))
        if responding:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._close(linger=status != 503)

    def _close(self, linger: bool) -> None:
        """Closes the connection.

        Args:
            linger: whether to keep reading for `LINGER_S`, because closing with unread data resets the connection and
                the client might lose the response.
        """
        if linger and not self.transport.is_closing() and self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.release(read=True)
            self._close_soon(LINGER_S)
        else:
            self.transport.close()


def chunk_writer(send: Any) -> Callable[[bytes], bool] | None:
    """Returns a function that writes a chunk of a response without a task switch; None if the server has none.

    The function returns False, without writing, where `send` has to be called: before the start of the response, and
    while the client reads too slowly.

    Args:
        send: the server's own ASGI send.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return None

    def write(data: bytes) -> bool:
        open_ended = cycle.response_started and cycle.chunked_encoding and not cycle.response_complete
        if not open_ended or cycle.disconnected or cycle.flow.write_paused:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return write


def _is_name(host: bytes) -> bool:
    """Returns whether a Host header can be decoded; the WebSocket protocol fails on others."""
    try:
        host.decode("idna")
    except UnicodeError:
        return False
    return True


def _error_response(status: int, message: str) -> bytes:
    kind = "invalid_request_error" if status < 500 else "service_unavailable_error"
    body = orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}})
    retry_after = b"retry-after: 1\r\n" if status == 503 else b""
    head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    return head % (status, _PHRASES[status], len(body)) + retry_after + b"connection: close\r\n\r\n" + body


_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


def _partial_terminator(data: bytes) -> int:
    """Returns how many bytes at the end of `data` may belong to the terminator of the headers."""
    for size in (3, 2, 1):
        if data.endswith(_END_OF_HEAD[:size]):
            return size
    return 0
