"""uvicorn's HTTP/1.1 protocol with bounds on headers and their arrival time, read-ahead, connections and closing."""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.net.http.bounded_reader import READ_BYTES, BoundedReader, PausedFlowControl
from services.common.net.http.bounds import (
    BODY_AHEAD_BYTES,
    CHUNKS,
    CONNECTIONS,
    HEADERS,
    MAX_CHUNK_FRAMING_BYTES,
    MAX_HEADERS,
    SLICE_BYTES,
    Bounds,
    error_response,
)

ABORT_KEY = "sluice.abort"
"""Key of the ASGI scope: a function that aborts the connection and discards pending data."""

LINGER_S = 1.0
_END_OF_HEAD = b"\r\n\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """Serves one connection. The URI names of a client's certificate are in the scope's state as `peer_uris`.

    Closes connections beyond the limit and those whose headers arrive too slowly. When the server stops, idle
    connections stay open for `LINGER_S`, so that a request already in transit gets a response with `connection: close`.

    Parses the next request only after the response to the current one. Until then pipelined requests stay unparsed, and
    the connection is paused when they exceed the bounds. A chunked body is parsed in slices, one per iteration of the
    event loop, while the connection is paused.

    Attributes:
        bounds: bounds of all connections of a server.
        server_stops: whether the server accepts no more requests.
    """

    bounds: ClassVar[Bounds] = Bounds()
    server_stops: ClassVar[bool] = False
    flow: PausedFlowControl

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._unparsed = b""
        self._framing_bytes = 0  # received since the last body byte or the end of the last request
        self._chunk_framing = 0  # eighths of a byte, less an eighth of the body
        self._trailers = 0
        self._parse_due = False
        self._headers_due: asyncio.TimerHandle | None = None
        self._close_due: asyncio.TimerHandle | None = None
        self._in_message = False
        self._in_body = False
        self._body_left: int | None = 0  # bytes; None: chunked
        self._parsing_stopped = False
        self._pipelining_counted = False
        self._closing = False

    @staticmethod
    def error_body(status: int, code: str, message: str) -> bytes:
        """Returns the JSON body of an error; servers with another dialect override it."""
        return json.dumps({"error": {"code": code, "message": message, "param": None}}).encode()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = PausedFlowControl(transport)
        transport.set_protocol(BoundedReader(self))
        if hasattr(transport, "set_read_buffer_limits"):  # TLS: bounds received data that is not decrypted yet
            transport.set_read_buffer_limits(READ_BYTES)
        if len(self.connections) > self.bounds.connections:
            CONNECTIONS.count()
            self._refuse(503, "too_many_connections", "The server has too many open connections; try again soon.")
            return
        names = (transport.get_extra_info("peercert") or {}).get("subjectAltName", ())
        if uris := [value for kind, value in names if kind == "URI"]:
            self.app_state = {**self.app_state, "peer_uris": uris}
        self._start_keep_alive_timeout(min(self.timeout_keep_alive, self.bounds.opening_timeout_s))
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
            if self._in_chunks:
                self._chunk_framing += len(data) << 3
            super().data_received(data)
            if self._framing_bytes > self.bounds.header_bytes:  # an endless chunk header or trailer
                self._refuse_headers()
            elif self._chunk_framing > MAX_CHUNK_FRAMING_BYTES << 3:
                self._refuse_chunks()
            if self._unparsed and self._in_chunks:
                self._parse_later()  # lets other connections proceed first
                break
        self._read_ahead()

    def _parse_later(self) -> None:
        if not self._parse_due:
            self._parse_due = True
            self.loop.call_soon(self._parse_now)

    def _parse_now(self) -> None:
        self._parse_due = False
        self._parse()

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
            index = data.find(_END_OF_HEAD, 0, SLICE_BYTES)
            if index < 0:
                data = data[:SLICE_BYTES]
                end = len(data) - _partial_terminator(data)
            else:
                end = index + len(_END_OF_HEAD)
        elif self._body_left is None:  # chunked: only the parser finds the end
            end = min(SLICE_BYTES, len(data))
        else:
            end = min(self._body_left, len(data))
        self._unparsed = self._unparsed[end:]
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
        """Returns False: requests to upgrade are ordinary requests."""
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: clients may offer any upgrade."""

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
        super().on_headers_complete()
        self._framing_bytes = self._trailers = self._chunk_framing = 0
        self._in_body, self._body_left = True, 0
        for name, value in self.headers:
            if name == b"content-length":
                self._body_left = int(value)
            elif name == b"transfer-encoding":
                self._body_left = None
                break
        if self._closing and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if self._parsing_stopped:
            return
        self._framing_bytes = 0
        if self._body_left is None:
            self._chunk_framing -= 9 * len(body)
        else:
            self._body_left -= len(body)
        super().on_body(body)
        if len(self.cycle.body) > BODY_AHEAD_BYTES:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if self._parsing_stopped:
            return
        self._in_message = self._in_body = False
        self._framing_bytes = self._chunk_framing = 0
        super().on_message_complete()
        if self._close_due is not None:
            self._cancel_close()
            self._start_keep_alive_timeout(self.timeout_keep_alive)

    def send_400_response(self, msg: str) -> None:
        if not self._parsing_stopped:
            self._refuse(400, "invalid_http", "This is not a valid HTTP request; check the request line and headers.")

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
            self._parse_later()
        if self._closing:
            self.loop.call_later(LINGER_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _start_keep_alive_timeout(self, seconds: float) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

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
        if not self._parsing_stopped:
            HEADERS.count()
        limits = f"{self.bounds.header_bytes} bytes or {MAX_HEADERS} lines"
        self._refuse(431, "headers_too_large", f"The headers exceed {limits}; send fewer or shorter ones.")

    def _refuse_chunks(self) -> None:
        if not self._parsing_stopped:
            CHUNKS.count()
        limit = f"{MAX_CHUNK_FRAMING_BYTES} bytes and an eighth of its content"
        message = f"The framing of this chunked body exceeds {limit}; send chunks of 64 bytes or more."
        self._refuse(400, "chunks_too_small", message)

    def _start_header_timeout(self) -> None:
        self._headers_due = self.loop.call_later(self.bounds.header_timeout_s, self._refuse_late_headers)

    def _cancel_header_timeout(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _refuse_late_headers(self) -> None:
        self._headers_due = None
        limit = f"{self.bounds.header_timeout_s:g} s"
        self._refuse(408, "headers_timeout", f"The headers did not arrive within {limit}; send them at once.")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Sends an error response without calling the application, and closes the connection."""
        if self._parsing_stopped:
            return
        self._stop_parsing()
        self._cancel_header_timeout()
        self._unset_keepalive_if_required()
        responding = self.cycle is not None and not self.cycle.response_complete
        responded = self._in_body and not responding  # the client would take it for the response to its next request
        if not responded and not (responding and self.cycle.response_started):
            self.transport.write(error_response(status, self.error_body(status, code, message)))
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


def _partial_terminator(data: bytes) -> int:
    """Returns how many bytes at the end of `data` may belong to the terminator of the headers."""
    for size in (3, 2, 1):
        if data.endswith(_END_OF_HEAD[:size]):
            return size
    return 0
