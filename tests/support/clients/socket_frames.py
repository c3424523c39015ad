"""Frames of a WebSocket client, byte by byte, with any fragmentation."""

from __future__ import annotations

from collections.abc import Iterable

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
_MASK = b"\1\2\3\4"


def frame(payload: bytes, opcode: int = TEXT, is_last: bool = True) -> bytes:
    """Returns a masked frame."""
    size = len(payload)
    if size < 126:
        length = bytes((0x80 | size,))
    else:
        length = b"\xfe" + size.to_bytes(2, "big") if size < 1 << 16 else b"\xff" + size.to_bytes(8, "big")
    masked = bytes(byte ^ _MASK[index % 4] for index, byte in enumerate(payload))
    return bytes((opcode | (0x80 if is_last else 0),)) + length + _MASK + masked


def fragments(text: bytes, sizes: Iterable[int]) -> list[bytes]:
    """Returns the frames of a text message: fragments of `sizes` bytes, then one with what is left."""
    frames: list[bytes] = []
    start = 0
    for size in sizes:
        if start + size >= len(text):
            break
        frames.append(frame(text[start : start + size], CONTINUATION if frames else TEXT, is_last=False))
        start += size
    return [*frames, frame(text[start:], CONTINUATION if frames else TEXT)]


def handshake(path: str = "/v1/responses", host: str = "localhost", *headers: str) -> bytes:
    """Returns the request that opens a WebSocket."""
    lines = [
        f"GET {path} HTTP/1.1",
        f"Host: {host}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Version: 13",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode()
