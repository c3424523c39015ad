"""Bytes that grow at the end without being copied: the output of a batch in memory."""

from __future__ import annotations

from bisect import bisect_right

JOINED_BYTES = 16 << 10
"""Shorter pieces are joined, so that many small ones take no memory beyond their bytes."""


class Pieces:
    """A file that is appended to and read in ranges."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces: list[bytes | bytearray] = []
        self._starts: list[int] = []
        self._size = 0
        for piece in pieces:
            self.append(piece)

    def __len__(self) -> int:
        return self._size

    def append(self, piece: bytes) -> None:
        """Adds bytes at the end."""
        last = self._pieces[-1] if self._pieces else None
        if len(piece) >= JOINED_BYTES:
            self._add(piece)
        elif isinstance(last, bytearray) and len(last) < JOINED_BYTES:
            last += piece
        elif piece:
            self._add(bytearray(piece))
        self._size += len(piece)

    def _add(self, piece: bytes | bytearray) -> None:
        self._pieces.append(piece)
        self._starts.append(self._size)

    def read(self, start: int, size: int) -> bytes:
        """Returns up to `size` bytes from `start` on; fewer at the end."""
        found: list[bytes] = []
        index = max(bisect_right(self._starts, start) - 1, 0)
        while size > 0 and index < len(self._pieces):
            offset = start - self._starts[index]
            part = bytes(self._pieces[index][offset : offset + size])
            found.append(part)
            start, size, index = start + len(part), size - len(part), index + 1
        return b"".join(found)
