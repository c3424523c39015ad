"""One call: messages of gRPC within a stream of HTTP/2."""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from google.protobuf.message import DecodeError

from services.common.errors import SluiceError, internal
from services.common.rpc.errors import DETAIL_KEY, status_of, to_detail
from services.router.picker.http2 import header_blocks
from services.router.picker.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEAD,
    HEADERS,
    LARGEST_FRAME,
    LARGEST_WINDOW,
    BrokenConnection,
    ErrorCode,
    frame,
    rst_stream,
    window_update,
)

log = logging.getLogger(__name__)

STREAM_WINDOW = 1 << 20
"""Bytes that a peer may send on one stream before they are passed on or collected."""
CANCELLED, UNKNOWN_METHOD, TOO_LARGE, INTERNAL = 1, 12, 8, 13
"""Statuses of gRPC."""

PREFIX = struct.Struct(">BI")
"""Of a message in gRPC: whether it is compressed, and its length."""
_RESPONSE_HEAD = HEAD.pack(len(header_blocks.RESPONSE) << 8 | HEADERS, END_HEADERS, 0)[:5]
_STREAM = struct.Struct(">I")


def framed(message: bytes) -> bytes:
    """Returns a message with the prefix that gRPC gives it."""
    return PREFIX.pack(0, len(message)) + message


class CallHandler(Protocol):
    """Serves one call. What it raises ends the call: a SluiceError with its status, anything else as INTERNAL."""

    def on_message(self, message: bytes) -> None:
        """Receives the next message."""

    def on_half_close(self) -> None:
        """Receives the end of the caller's messages."""

    def on_end(self) -> None:
        """Receives the end of the call, exactly once: it is finished, cancelled, late, or its connection is lost."""


class Outlet(Protocol):
    """The connection of a call."""

    send_window: int
    congested: bool
    largest_message: int
    partial: int
    most_partial: int

    def write(self, data: bytes | memoryview) -> None:
        """Sends bytes with the others of this turn of the event loop."""

    def block(self, call: GrpcCall) -> None:
        """Calls `pump` of the call once there is room."""

    def credit(self, size: int) -> None:
        """Allows the peer to send more on the connection."""

    def forget(self, call: GrpcCall) -> None:
        """Removes a call that has ended."""


class GrpcCall:
    """One call as its handler sees it.

    Attributes:
        ended: nothing more is received or sent.
        half_closed: the caller has sent everything.
    """

    __slots__ = (
        "_handler",
        "_have",
        "_headers_sent",
        "_need",
        "_outlet",
        "_owed",
        "_parts",
        "_queue",
        "_trailers",
        "_uncredited",
        "_when_sent",
        "cancel_timer",
        "ended",
        "half_closed",
        "number",
        "receive_window",
        "send_window",
    )

    def __init__(self, outlet: Outlet, number: int, send_window: int) -> None:
        self._outlet = outlet
        self.number = number
        self.send_window = send_window
        self.receive_window = STREAM_WINDOW
        self.ended = self.half_closed = False
        self.cancel_timer: Callable[[], None] | None = None
        self._handler: CallHandler | None = None
        self._headers_sent = False
        self._parts: list[bytes] = []
        self._have = self._need = 0
        self._uncredited = self._owed = 0
        self._queue: deque[memoryview] | None = None
        self._trailers = b""
        self._when_sent: list[Callable[[], None]] | None = None

    @property
    def answered(self) -> bool:
        """Whether anything has been sent."""
        return self._headers_sent

    def start(self, handler: CallHandler) -> None:
        """Sets what serves the call."""
        self._handler = handler

    # Input

    def received(self, data: bytes, size: int) -> None:
        """Takes the payload of a DATA frame.

        Args:
            size: of the payload with its padding, as flow control counts it.
        """
        if size > self.receive_window:
            raise BrokenConnection(ErrorCode.FLOW_CONTROL_ERROR, "a stream exceeds its window")
        self.receive_window -= size
        if self._queue:  # the caller does not read what it is sent: let it send no more than its window
            self._owed += size
        else:
            self._outlet.credit(size)
        self._uncredited += size
        try:
            self._deliver(data)
        except SluiceError as error:
            self.fail(error)
        except DecodeError:
            self.finish(INTERNAL, "A message cannot be parsed; send messages of the declared type.")
        except Exception:
            log.exception("unexpected error in a call")
            self.fail(internal("Unexpected error; see the log."))
        if self._uncredited >= STREAM_WINDOW >> 1 and not self._queue and not self.ended:
            self._credit()

    def _credit(self) -> None:
        self.receive_window += self._uncredited
        if not self.half_closed:
            self._outlet.write(window_update(self.number, self._uncredited))
        self._uncredited = 0

    def _deliver(self, data: bytes) -> None:
        assert self._handler is not None
        if self._parts:
            self._parts.append(data)
            self._have += len(data)
            self._outlet.partial += len(data)
            if self._have < self._need:
                self._check_partial()
                return
            self._outlet.partial -= self._have
            data = b"".join(self._parts)
            self._parts.clear()
        at, size = 0, len(data)
        while size - at >= 5:
            compressed, length = PREFIX.unpack_from(data, at)
            if compressed:
                self.finish(UNKNOWN_METHOD, "Messages must not be compressed.")
                return
            if length > self._outlet.largest_message:
                self.finish(TOO_LARGE, f"A message of {length} bytes exceeds {self._outlet.largest_message}.")
                return
            end = at + 5 + length
            if end > size:
                break
            self._handler.on_message(data[at + 5 : end])
            if self.ended:
                return
            at = end
        if at < size:
            rest = data[at:] if at else data
            self._parts.append(rest)
            self._have = len(rest)
            self._need = 5 + PREFIX.unpack_from(rest)[1] if self._have >= 5 else 5
            self._outlet.partial += self._have
            self._check_partial()

    def _check_partial(self) -> None:
        if self._outlet.partial > self._outlet.most_partial:
            self.finish(TOO_LARGE, f"Messages that have arrived in part exceed {self._outlet.most_partial} bytes.")

    def half_close(self) -> None:
        """Takes the end of the caller's messages."""
        self.half_closed = True
        if self._parts:
            self.finish(INTERNAL, "The last message is incomplete.")
        elif self._handler is not None:
            self._handler.on_half_close()

    def cancel(self) -> None:
        """Ends the call: the caller has cancelled it, or the connection is lost."""
        if not self.ended:
            self._end()

    # Output

    def send(self, data: bytes) -> None:
        """Sends messages, each with its prefix; waits for no one, so bound what is sent for what was received."""
        if self.ended or self._trailers:
            return
        outlet = self._outlet
        if not self._headers_sent:
            self._send_headers()
        size = len(data)
        if (
            not self._queue
            and size <= LARGEST_FRAME
            and size <= self.send_window
            and size <= outlet.send_window
            and not outlet.congested
        ):
            self.send_window -= size
            outlet.send_window -= size
            outlet.write(HEAD.pack(size << 8, 0, self.number))
            outlet.write(data)
            return
        if self._queue is None:
            self._queue = deque()
        self._queue.append(memoryview(data))
        self.pump()

    def _send_headers(self) -> None:
        self._headers_sent = True
        self._outlet.write(_RESPONSE_HEAD + _STREAM.pack(self.number) + header_blocks.RESPONSE)

    def pump(self) -> None:
        """Sends what is queued, as far as the windows of the peer allow."""
        queue, outlet = self._queue, self._outlet
        while queue and not self.ended:
            view = queue[0]
            size = min(len(view), LARGEST_FRAME, self.send_window, outlet.send_window)
            if (size <= 0 and len(view)) or outlet.congested:
                outlet.block(self)
                return
            self.send_window -= size
            outlet.send_window -= size
            outlet.write(HEAD.pack(size << 8 | DATA, 0, self.number))
            outlet.write(view[:size])
            if size == len(view):
                queue.popleft()
            else:
                queue[0] = view[size:]
        self._sent()

    def _sent(self) -> None:
        if self._owed:
            self._outlet.credit(self._owed)
            self._owed = 0
        if self._uncredited >= STREAM_WINDOW >> 1 and not self.ended:
            self._credit()
        callbacks, self._when_sent = self._when_sent, None
        for callback in callbacks or ():
            callback()
        if self._trailers and not self.ended:
            self._close()

    def when_sent(self, callback: Callable[[], None]) -> None:
        """Calls back once everything sent so far is on its way, or the call has ended; at once if that is so."""
        if self._queue and not self.ended:
            self._when_sent = [*(self._when_sent or ()), callback]
        else:
            callback()

    def finish(self, status: int = 0, message: str = "", more: Iterable[tuple[str, str | bytes]] = ()) -> None:
        """Ends the call with a status of gRPC, after what has been sent."""
        if self.ended or self._trailers:
            return
        self._trailers = header_blocks.trailers(status, message, more) if status or more else header_blocks.OK
        if not self._queue:
            self._close()

    def fail(self, error: SluiceError) -> None:
        """Ends the call with an error."""
        detail = ((DETAIL_KEY, to_detail(error).SerializeToString()),)
        self.finish(status_of(error.kind).value[0], error.message, detail)

    def _close(self) -> None:
        block = self._trailers if self._headers_sent else header_blocks.RESPONSE + self._trailers
        if len(block) > LARGEST_FRAME:
            block = header_blocks.RESPONSE * (not self._headers_sent) + header_blocks.trailers(INTERNAL)
        self._outlet.write(frame(HEADERS, END_HEADERS | END_STREAM, self.number, block))
        if not self.half_closed:
            self._outlet.write(rst_stream(self.number, ErrorCode.NO_ERROR))
        self._end()

    def _end(self) -> None:
        self.ended = True
        if self.cancel_timer is not None:
            self.cancel_timer()
            self.cancel_timer = None
        if self._parts:
            self._outlet.partial -= self._have
            self._parts.clear()
        self._queue = None
        if self._owed:
            self._outlet.credit(self._owed)
            self._owed = 0
        callbacks, self._when_sent = self._when_sent, None
        for callback in callbacks or ():
            callback()
        self._outlet.forget(self)
        handler, self._handler = self._handler, None
        if handler is not None:
            try:
                handler.on_end()
            except Exception:
                log.exception("unexpected error at the end of a call")

    def widen(self, size: int) -> None:
        """Takes a change of the window for what is sent; raises BrokenConnection if it exceeds its maximum."""
        self.send_window += size
        if self.send_window > LARGEST_WINDOW:
            raise BrokenConnection(ErrorCode.FLOW_CONTROL_ERROR, "the window of a stream exceeds 2^31-1")
        if self._queue:
            self.pump()
