"""Bounds of HTTP connections, and the responses that refuse what exceeds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from services.common.base.budgets import Budget

MAX_HEADERS = 128
"""Lines of the headers of a request, or of a body's trailers; more are refused with status 431, budget `headers`."""
BODY_AHEAD_BYTES = 32 << 10
"""Unread bytes of a body at which the connection is paused."""
SLICE_BYTES = 8 << 10
"""Bytes of headers or of a chunked body that are parsed at once: each chunk, however small, costs a callback."""
MAX_CHUNK_FRAMING_BYTES = 32 << 10
"""Bytes of a chunked body's framing beyond an eighth of its content; more are refused, budget `body_chunks`.

Framing is the sizes, extensions and line breaks of chunks. Chunks of 64 bytes or more never exceed it, and of the
smallest ones 6,553 may be sent.
"""

HEADERS = Budget("headers", MAX_HEADERS, "")
CHUNKS = Budget("body_chunks", MAX_CHUNK_FRAMING_BYTES, "")
CONNECTIONS = Budget("connections", 0, "")
"""Counts the connections that are refused; see `Bounds`."""


def _default_pipelined() -> Budget:
    return Budget("pipelined_requests", 4, "")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on connections.

    Attributes:
        connections: open connections; further ones are closed at once.
        header_bytes: size of request line and headers.
        header_timeout_s: longest time for the headers of a request to arrive.
        body_timeout_s: longest wait for the rest of a body after the response to its request is complete.
        pipelined: bounds the requests read ahead of the current one.
        opening_timeout_s: longest time until the first byte of a connection, if shorter than that of keep-alive.
    """

    connections: int = 16_384
    header_bytes: int = 32 << 10
    header_timeout_s: float = 15.0
    body_timeout_s: float = 30.0
    pipelined: Budget = field(default_factory=_default_pipelined)
    opening_timeout_s: float = inf


def error_response(status: int, body: bytes) -> bytes:
    """Returns a whole HTTP response that closes the connection."""
    retry_after = b"retry-after: 1\r\n" if status == 503 else b""
    head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    return head % (status, _PHRASES[status], len(body)) + retry_after + b"connection: close\r\n\r\n" + body


_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}
