"""Frames between a process and its child: a length (uint32, little-endian) and that many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

HEADER = Struct("<I")


def frame(body: bytes) -> bytes:
    """Returns a frame with this body."""
    return HEADER.pack(len(body)) + body


class FrameReader:
    """Splits received bytes into frames.

    Args:
        max_bytes: maximum size of a frame's body.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the bodies of complete frames; raises ValueError for one that is too large."""
        received = self._received
        received += data
        while len(received) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(received)[0]
            if end > HEADER.size + self._max_bytes:
                raise ValueError(f"a frame of {end - HEADER.size} bytes")
            if len(received) < end:
                return
            with memoryview(received) as view:
                body = bytes(view[HEADER.size : end])
            del received[:end]
            yield body
