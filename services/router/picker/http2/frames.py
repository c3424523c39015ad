"""Frames of HTTP/2 (RFC 9113): their kinds, flags, limits and errors."""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = struct.Struct(">IBI")
"""Head of a frame: its length and kind in one number (length << 8 | kind), flags, stream."""
HEAD_BYTES = 9
LARGEST_FRAME = 16_384
"""Largest payload of a frame in both directions: the smallest limit that a peer may have."""
LARGEST_WINDOW = (1 << 31) - 1
LARGEST_STREAM = (1 << 31) - 1
FIRST_WINDOW = 65_535

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9

ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

_NUMBER = struct.Struct(">I")
_PAIR = struct.Struct(">II")
_SETTING = struct.Struct(">HI")


class Http2Setting(IntEnum):
    """Settings that matter here; others are ignored, as the RFC demands."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Reasons for the end of a stream or of a connection."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class BrokenConnection(Exception):
    """The peer violates the protocol or a limit, which ends its connection.

    Args:
        reason: what is wrong, for the peer and the log.
    """

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Returns a frame."""
    return HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


def window_update(stream: int, size: int) -> bytes:
    """Returns a frame that allows the peer to send `size` more bytes."""
    return frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(size))


def rst_stream(stream: int, code: ErrorCode) -> bytes:
    """Returns a frame that ends a stream at once."""
    return frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def goaway(last_stream: int, code: ErrorCode, reason: str = "") -> bytes:
    """Returns a frame that announces the end of the connection; streams up to the last one are still served."""
    return frame(GOAWAY, 0, 0, _PAIR.pack(last_stream, code) + reason.encode())


def settings(values: dict[Http2Setting, int]) -> bytes:
    """Returns a frame with settings."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in values.items()))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Returns settings in order; raises BrokenConnection for values that the RFC forbids."""
    if len(payload) % _SETTING.size:
        raise BrokenConnection(ErrorCode.FRAME_SIZE_ERROR, "a SETTINGS frame is not a list of settings")
    found = list(_SETTING.iter_unpack(payload))
    for name, value in found:
        if name == Http2Setting.INITIAL_WINDOW_SIZE and value > LARGEST_WINDOW:
            raise BrokenConnection(ErrorCode.FLOW_CONTROL_ERROR, "the initial window exceeds 2^31-1")
        if name == Http2Setting.ENABLE_PUSH and value > 1:
            raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        if name == Http2Setting.MAX_FRAME_SIZE and not LARGEST_FRAME <= value < 1 << 24:
            raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of bounds")
    return found


def read_number(payload: bytes) -> int:
    """Returns the number that a RST_STREAM or WINDOW_UPDATE frame consists of."""
    if len(payload) != _NUMBER.size:
        raise BrokenConnection(ErrorCode.FRAME_SIZE_ERROR, "a frame of one number does not have 4 bytes")
    return int(_NUMBER.unpack(payload)[0])


def without_padding(payload: bytes, flags: int) -> bytes:
    """Returns the payload of a HEADERS or DATA frame without its padding and priority."""
    start, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise BrokenConnection(ErrorCode.FRAME_SIZE_ERROR, "a padded frame is empty")
        start, end = 1, end - payload[0]
    if flags & WITH_PRIORITY:
        start += 5
    if start > end:
        raise BrokenConnection(ErrorCode.PROTOCOL_ERROR, "the padding of a frame exceeds its payload")
    return payload[start:end]
