"""Header blocks of gRPC calls: reads those of a peer, and writes the few that the server sends.

A proxy sends the same headers with every call. Once they are in the table of HPACK, the bytes of the block are the same
too, so decoding them again is one look-up. Blocks are written without the table, which costs a few bytes and no state.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from hpack import Decoder, HPACKError

from services.router.picker.http2.frames import END_HEADERS, BrokenConnection, ErrorCode

LARGEST_LIST = 64 << 10
"""Most bytes of the headers of a call, encoded and, as HPACK counts them, decoded."""
MOST_HEADERS = 128
MOST_PARTS = 16
"""HEADERS and CONTINUATION frames of one block."""
MOST_CACHED = 256
LONGEST_CACHED = 2_048  # bytes of a block

_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_STATUS_200 = b"\x88"


@dataclass(frozen=True, slots=True)
class CallHead:
    """What the headers of a call say.

    Attributes:
        path: ``/service/method``.
        authorization: values of this header.
        timeout_s: after which the caller does not wait any longer; 0: it waits without limit.
        problem: why this is not a gRPC call; empty: it is one.
    """

    path: str
    authorization: tuple[str, ...] = ()
    timeout_s: float = 0.0
    problem: str = ""


class HeaderBlocks:
    """Decodes the header blocks of one connection, in order.

    Attributes:
        open_stream: stream of the block whose parts are arriving; 0: none.
        flags: of the HEADERS frame of the last block.
    """

    def __init__(self) -> None:
        self.open_stream = self.flags = self._parts = 0
        self._block = bytearray()
        self._decoder = Decoder(LARGEST_LIST)
        self._cached: dict[bytes, CallHead] = {}

    def begin(self, stream: int, flags: int) -> None:
        """Starts the block of a stream; `add` takes its parts."""
        self.open_stream, self.flags, self._parts = stream, flags, 0

    def add(self, flags: int, part: bytes) -> CallHead | None:
        """Takes the next part of the open block; returns its head if it is the last one."""
        self._parts += 1
        if self._parts > MOST_PARTS or len(self._block) + len(part) > LARGEST_LIST:
            limits = f"{LARGEST_LIST} bytes or {MOST_PARTS} parts"
            raise BrokenConnection(ErrorCode.ENHANCE_YOUR_CALM, f"a header block exceeds {limits}")
        if not flags & END_HEADERS:
            self._block += part
            return None
        self.open_stream = 0
        if self._block:
            part = bytes(self._block) + part
            self._block.clear()
        return self.read(part)

    def read(self, block: bytes) -> CallHead:
        """Returns the head of a call; raises BrokenConnection if the block is malformed or too large."""
        found = self._cached.get(block)
        if found is not None:
            return found
        table: Any = self._decoder.header_table
        before = _newest(table)
        try:
            headers = list(self._decoder.decode(block, raw=True))
        except (HPACKError, ValueError, IndexError) as error:
            reason = f"the headers of a call cannot be decoded: {type(error).__name__}"
            raise BrokenConnection(ErrorCode.COMPRESSION_ERROR, reason) from error
        if len(headers) > MOST_HEADERS:
            raise BrokenConnection(ErrorCode.ENHANCE_YOUR_CALM, f"a call has more than {MOST_HEADERS} headers")
        head = read_head((bytes(name).lower(), bytes(value)) for name, value in headers)
        if _newest(table) != before:
            self._cached.clear()  # the same bytes now have another meaning
        elif len(self._cached) < MOST_CACHED and len(block) <= LONGEST_CACHED:
            self._cached[block] = head
        return head


def _newest(table: Any) -> tuple[int, int, int]:
    entries = table.dynamic_entries
    return (id(entries[0]) if entries else 0, len(entries), table.maxsize)


def read_head(headers: Iterable[tuple[bytes, bytes]]) -> CallHead:
    """Returns the head of a call from its headers, with lower-case names."""
    path = method = kind = timeout = ""
    authorization: list[str] = []
    for name, value in headers:
        text = value.decode("latin-1")
        if name == b":path":
            path = text
        elif name == b":method":
            method = text
        elif name == b"content-type":
            kind = text
        elif name == b"grpc-timeout":
            timeout = text
        elif name == b"authorization":
            authorization.append(text)
    problem = ""
    if method != "POST" or not kind.startswith("application/grpc"):
        problem = "This port serves gRPC: send POST with content-type application/grpc."
    given = _TIMEOUT.fullmatch(timeout)
    seconds = int(given[1]) * _UNITS[given[2]] if given else 0.0
    return CallHead(path, tuple(authorization), seconds, problem)


def _number(value: int, bits: int, first: int) -> bytes:
    """Returns a number in HPACK's form, whose first byte has `bits` bits for it."""
    most = (1 << bits) - 1
    if value < most:
        return bytes((first | value,))
    found, value = bytearray((first | most,)), value - most
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def literal(name: bytes, value: bytes) -> bytes:
    """Returns one header, encoded without the table."""
    return b"\x00" + _number(len(name), 7, 0) + name + _number(len(value), 7, 0) + value


RESPONSE = _STATUS_200 + literal(b"content-type", b"application/grpc")
"""The headers of every response."""
OK = literal(b"grpc-status", b"0")
"""The trailers of a call that succeeded."""


def trailers(status: int, message: str = "", more: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    """Returns the trailers that end a call.

    Args:
        status: of gRPC.
        more: further ones; names that end with ``-bin`` have bytes.
    """
    found = [literal(b"grpc-status", b"%d" % status)]
    if message:
        found.append(literal(b"grpc-message", quote(message, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~").encode()))
    for name, value in more:
        text = b64encode(value) if isinstance(value, bytes) else value.encode()
        found.append(literal(name.encode(), text))
    return b"".join(found)
