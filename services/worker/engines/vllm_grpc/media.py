"""Whether a vLLM gRPC server processes images: what it says, and a request that proves it."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable
from typing import Any

from services.common.media.spans import MediaFile, MediaKind, MediaSpan, content_hash
from services.worker.contract.generation import GenerateRequest, MediaItem

_PROBE_SIDE = 64


def is_offered(server: Any) -> bool:
    """Returns whether a server processes images, as far as its GetServerInfo response says; probe it as well."""
    if server.kv_connector:  # a decode worker would need the images again
        return False
    return bool(server.mm_processor) and "data" in server.mm_media_ref_schemes.split(",")


def probe(placeholder: int) -> GenerateRequest:
    """Returns a request with one white image, which only a server that processes images completes."""
    data = _white_png(_PROBE_SIDE)
    digest = content_hash(data)
    packed = array("I", [placeholder]).tobytes()
    item = MediaItem(MediaSpan(MediaKind.IMAGE, digest, 0, 1, packed, 1), MediaFile(digest, data, "image/png"))
    return GenerateRequest("", "", array("I", [placeholder, 0]), media=(item,))


def _white_png(side: int) -> bytes:
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\xff" * 3 * side) * side)
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunks(((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))))


def _chunks(parts: Iterable[tuple[bytes, bytes]]) -> Iterable[bytes]:
    for name, data in parts:
        yield struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
