"""One connection of HTTP/2 (RFC 9113), as the server of gRPC calls needs it: frames, flow control and limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from services.router.picker.http2 import frames
from services.router.picker.http2.call import STREAM_WINDOW, GrpcCall
from services.router.picker.http2.flood_guard import FrameGuard
from services.router.picker.http2.frames import DATA, HEAD, HEAD_BYTES, BrokenConnection, ErrorCode, Http2Setting
from services.router.picker.http2.header_blocks import LARGEST_LIST, CallHead, HeaderBlocks
from services.router.picker.http2.timers import ConnectionTimers

log = logging.getLogger(__name__)

CONNECTION_WINDOW = 16 << 20
"""Bytes that a peer may send on all streams before they are passed on or collected."""
MOST_UNWRITTEN = 1 << 20  # bytes of frames that the transport may hold before calls wait

Serve = Callable[[GrpcCall, CallHead, "Http2Connection"], None]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on one peer.

    Attributes:
        streams: most calls at the same time.
        message_bytes: the largest message.
        partial_bytes: most bytes of messages that have arrived in part.
        age_s: after which the connection is closed once its calls have ended; 0: never.
    """

    streams: int = 10_000
    message_bytes: int = 16 << 20
    partial_bytes: int = 64 << 20
    age_s: float = 0.0


class Http2Connection(asyncio.Protocol):
    """Serves the calls of one peer.

    Args:
        serve: starts a call.
        connections: all connections of the server, to which this one belongs while it is open.

    Attributes:
        closed: done once the connection is lost.
        peer_uris: URI names of the verified client certificate.
    """

    def __init__(self, serve: Serve, connections: set[Http2Connection], limits: ConnectionLimits) -> None:
        self._serve = serve
        self._connections = connections
        self._limits = limits
        self._calls: dict[int, GrpcCall] = {}
        self._blocked: dict[GrpcCall, None] = {}
        self._out: list[bytes | memoryview] = []
        self._rest = b""
        self._preface = True
        self._greeted = False
        self._flushing, self._unwritten = False, 0
        self._last = 0
        self._last_served = frames.LARGEST_STREAM
        self._uncredited = 0
        self._receive_window = CONNECTION_WINDOW
        self._initial_window = frames.FIRST_WINDOW
        self._headers = HeaderBlocks()
        self._guard = FrameGuard()
        self._timers = ConnectionTimers(self.abort, self._ping)
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.send_window = frames.FIRST_WINDOW
        self.congested = False
        self.largest_message = limits.message_bytes
        self.partial, self.most_partial = 0, limits.partial_bytes
        self.peer_uris: list[str] = []

    # The transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greets the peer."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(MOST_UNWRITTEN)
        names = (transport.get_extra_info("peercert") or {}).get("subjectAltName", ())
        self.peer_uris = [value for kind, value in names if kind == "URI"]
        tls: Any = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self._transport.abort()
            return
        self._connections.add(self)
        values = {
            Http2Setting.MAX_CONCURRENT_STREAMS: self._limits.streams,
            Http2Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            Http2Setting.MAX_HEADER_LIST_SIZE: LARGEST_LIST,
        }
        self.write(frames.settings(values))
        self.write(frames.window_update(0, CONNECTION_WINDOW - frames.FIRST_WINDOW))
        self._timers.start(self._limits.age_s, self.drain)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all calls."""
        self._closing = True
        self._connections.discard(self)
        self._timers.close()
        self._out.clear()
        for call in list(self._calls.values()):
            call.cancel()
        self.closed.set_result(None)

    def pause_writing(self) -> None:
        """Stops sending messages: the peer does not read."""
        self.congested = True

    def resume_writing(self) -> None:
        """Goes on sending messages."""
        self.congested = False
        self._unblock()

    def eof_received(self) -> bool:
        """Closes the connection."""
        return False

    def data_received(self, data: bytes) -> None:
        """Takes what the peer sends."""
        if self._closing:
            return
        self._timers.heard = True
        try:
            self._read(data)
        except BrokenConnection as error:
            self._break(error)
        if self._out:
            self._flush()

    def write(self, data: bytes | memoryview) -> None:
        """Sends bytes with the others of this turn of the event loop."""
        self._out.append(data)
        self._unwritten += len(data)
        if self._unwritten > MOST_UNWRITTEN:
            self._flush()  # so that the transport can say that it has enough
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing, self._unwritten = False, 0
        out, self._out = self._out, []
        if out and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(out)

    def _ping(self) -> None:
        self.write(frames.frame(frames.PING, 0, 0, b"keepaliv"))

    # The end

    @property
    def calls(self) -> int:
        """The number of calls under way."""
        return len(self._calls)

    def abort(self) -> None:
        """Ends the connection and its calls at once."""
        if self._transport is not None:
            self._transport.abort()

    def drain(self) -> None:
        """Announces the end of the connection, which is closed once its calls have ended."""
        if not self._closing and self._timers.last_streams(self._refuse_more):
            self.write(frames.goaway(frames.LARGEST_STREAM, ErrorCode.NO_ERROR))

    def _refuse_more(self) -> None:
        self._last_served = self._last
        self.write(frames.goaway(self._last, ErrorCode.NO_ERROR))
        self._close_if_done()

    def _close_if_done(self) -> None:
        if not self._calls and self._last_served != frames.LARGEST_STREAM and not self._closing:
            self._close()

    def _close(self) -> None:
        self._closing = True
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _break(self, error: BrokenConnection) -> None:
        log.warning("a connection to the picker is closed: %s", error.reason)
        self.write(frames.goaway(self._last, error.code, error.reason))
        for call in list(self._calls.values()):
            call.cancel()
        self._close()

    # Frames

    def _read(self, data: bytes) -> None:
        buffer = self._rest + data if self._rest else data
        at, end = 0, len(buffer)
        if self._preface:
            if not frames.PREFACE.startswith(buffer[: len(frames.PREFACE)]):
                raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "this port serves HTTP/2 only")
            if end < len(frames.PREFACE):
                self._rest = buffer
                return
            self._preface, at = False, len(frames.PREFACE)
        unpack, calls = HEAD.unpack_from, self._calls
        while end - at >= HEAD_BYTES:
            word, flags, number = unpack(buffer, at)
            length = word >> 8
            if length > frames.LARGEST_FRAME:
                raise BrokenConnection(ErrorCode.FRAME_SIZE_ERROR, f"a frame exceeds {frames.LARGEST_FRAME} bytes")
            stop = at + HEAD_BYTES + length
            if stop > end:
                break
            payload = buffer[at + HEAD_BYTES : stop]
            at = stop
            if word & 0xFF == DATA and not self._headers.open_stream:
                self._on_data(calls.get(number), number, flags, payload)
            else:
                self._on_frame(word & 0xFF, flags, number & frames.LARGEST_STREAM, payload)
        self._rest = buffer[at:] if at < end else b""

    def _on_data(self, call: GrpcCall | None, number: int, flags: int, payload: bytes) -> None:
        size = len(payload)
        if size > self._receive_window:
            raise BrokenConnection(ErrorCode.FLOW_CONTROL_ERROR, "the connection exceeds its window")
        self._receive_window -= size
        if call is None:
            if not 0 < number <= self._last or not self._greeted:
                raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "DATA on a stream that is not open")
            self._guard.control()
            self.credit(size)
            return
        if call.half_closed:
            raise BrokenConnection(ErrorCode.STREAM_CLOSED, "DATA after the end of a stream")
        if flags & frames.PADDED:
            payload = frames.without_padding(payload, frames.PADDED)
        if payload or size:
            call.received(payload, size)
        elif not flags & frames.END_STREAM:
            self._guard.control()
        if flags & frames.END_STREAM and not call.ended:
            call.half_close()

    def _on_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        open_stream = self._headers.open_stream
        if open_stream and (kind != frames.CONTINUATION or number != open_stream):
            raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
        if not self._greeted:
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "the first frame is not frames.SETTINGS")
            self._greeted = True
            self._timers.greeted()
        if kind == frames.HEADERS:
            self._on_headers(flags, number, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._on_window(number, frames.read_number(payload))
        elif kind == frames.RST_STREAM:
            self._on_reset(number, frames.read_number(payload))
        elif kind == frames.CONTINUATION:
            if not open_stream:
                raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without frames.HEADERS")
            self._add_headers(number, flags, payload)
        elif kind == frames.SETTINGS:
            self._on_settings(flags, number, payload)
        elif kind == frames.PING:
            self._on_ping(flags, number, payload)
        elif kind == frames.PUSH_PROMISE:
            raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "a client must not send frames.PUSH_PROMISE")
        elif kind == frames.GOAWAY:
            if number:
                raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
            self._guard.control()
            if not self._calls:
                self._close()
        else:
            if kind == frames.PRIORITY and len(payload) != 5:
                raise BrokenConnection(ErrorCode.FRAME_SIZE_ERROR, "a PRIORITY frame does not have 5 bytes")
            self._guard.control()  # PRIORITY and kinds that are not known

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        if not number & 1:
            raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream that a client cannot open")
        self._headers.begin(number, flags)
        self._add_headers(number, flags, frames.without_padding(payload, flags))

    def _add_headers(self, number: int, flags: int, part: bytes) -> None:
        head = self._headers.add(flags, part)  # also of a refused call: the table of the peer changes with it
        if head is None:
            return
        if number > self._last:
            self._open(number, head)
            return
        call = self._calls.get(number)
        if call is None:
            self._guard.control()  # trailers of a call that has ended
        elif not self._headers.flags & frames.END_STREAM or call.half_closed:
            raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "HEADERS in the middle of a stream")
        else:
            call.half_close()

    def _open(self, number: int, head: CallHead) -> None:
        if number > self._last_served:
            self._guard.control()
            return
        self._last = number
        if len(self._calls) >= self._limits.streams:
            self._guard.control()
            self.write(frames.rst_stream(number, ErrorCode.REFUSED_STREAM))
            return
        call = self._calls[number] = GrpcCall(self, number, self._initial_window)
        if head.timeout_s:
            call.cancel_timer = self._loop.call_later(head.timeout_s, self._on_late, call).cancel
        self._serve(call, head, self)
        if self._headers.flags & frames.END_STREAM and not call.ended:
            call.half_close()

    def _on_late(self, call: GrpcCall) -> None:
        self.write(frames.rst_stream(call.number, ErrorCode.CANCEL))
        call.cancel()

    def _on_window(self, number: int, size: int) -> None:
        if not size:
            raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
        if number:
            call = self._calls.get(number)
            if call is not None:
                call.widen(size)
            elif number > self._last:
                raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on a stream that is not open")
            return
        self.send_window += size
        if self.send_window > frames.LARGEST_WINDOW:
            raise BrokenConnection(ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection exceeds 2^31-1")
        self._unblock()

    def _on_reset(self, number: int, _: int) -> None:
        if not number or number > self._last:
            raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on a stream that is not open")
        call = self._calls.get(number)
        if call is None:
            return  # it has ended here too
        self._guard.reset(call.answered)
        call.cancel()

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number or (flags & frames.ACK and payload):
            raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "a SETTINGS frame is malformed")
        self._guard.control(1 + len(self._calls) / 100)
        if flags & frames.ACK:
            return
        for name, value in frames.read_settings(payload):
            if name == Http2Setting.INITIAL_WINDOW_SIZE:
                change, self._initial_window = value - self._initial_window, value
                for call in list(self._calls.values()):
                    call.widen(change)
        self.write(frames.frame(frames.SETTINGS, frames.ACK, 0))

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "a PING frame is malformed")
        self._guard.control()
        if not flags & frames.ACK:
            self.write(frames.frame(frames.PING, frames.ACK, 0, payload))

    # What calls need

    def block(self, call: GrpcCall) -> None:
        """Calls `pump` of the call once there is room."""
        self._blocked[call] = None

    def _unblock(self) -> None:
        blocked, self._blocked = self._blocked, {}
        for call in blocked:
            call.pump()  # blocks again if there is not enough room

    def credit(self, size: int) -> None:
        """Allows the peer to send more on the connection."""
        self._uncredited += size
        if self._uncredited >= CONNECTION_WINDOW >> 1 and not self._closing:
            self._receive_window += self._uncredited
            self.write(frames.window_update(0, self._uncredited))
            self._uncredited = 0

    def forget(self, call: GrpcCall) -> None:
        """Removes a call that has ended."""
        self._calls.pop(call.number, None)
        self._blocked.pop(call, None)
        self._close_if_done()
