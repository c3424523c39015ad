"""Small files of every kind, written without a library, for what does not depend on the content of a media item."""

from __future__ import annotations

import struct
from functools import cache

from services.common.types.media.facts import AudioFacts, ImageFacts, VideoFacts
from services.common.types.media.spans import MediaKind, content_hash, png_file
from services.preprocess.media.expansion import CountedItem

SAMPLE_RATE = 16_000
FRAME_RATE = 2
_FRAME_FLAG = 0x10
"""AVIF_HASINDEX of an AVI file, and AVIIF_KEYFRAME of an entry of its index."""


def sample_png(width: int, height: int) -> bytes:
    """Returns a black PNG file."""
    return png_file(width, height, bytes(3 * width * height))


def sample_wav(samples: int, rate: int = SAMPLE_RATE) -> bytes:
    """Returns a silent WAV file of one channel of 16 bits."""
    header = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    return _chunk(b"RIFF", b"WAVE" + _chunk(b"fmt ", header) + _chunk(b"data", bytes(2 * samples)))


def sample_avi(width: int, height: int, frames: int, rate: int = FRAME_RATE) -> bytes:
    """Returns a black AVI file without compression."""
    row = (3 * width + 3) // 4 * 4
    size = row * height
    main = struct.pack(
        "<14I", 1_000_000 // rate, rate * size, 0, _FRAME_FLAG, frames, 0, 1, size, width, height, *[0] * 4
    )
    stream = struct.pack(
        "<4s4sIHHIIIIIIIIHHHH", b"vids", b"DIB ", *[0] * 4, 1, rate, 0, frames, size, 0, 0, 0, 0, width, height
    )
    # OpenCV fails on rows from the bottom up, which a positive height would declare.
    bitmap = struct.pack("<IiiHHIIiiII", 40, width, -height, 1, 24, 0, size, 0, 0, 0, 0)
    lists = _chunk(b"avih", main) + _list(b"strl", _chunk(b"strh", stream) + _chunk(b"strf", bitmap))
    movie = _list(b"movi", _chunk(b"00db", bytes(size)) * frames)
    entry = 8 + size + size % 2
    index = b"".join(struct.pack("<4sIII", b"00db", _FRAME_FLAG, 4 + entry * each, size) for each in range(frames))
    return _chunk(b"RIFF", b"AVI " + _list(b"hdrl", lists) + movie + _chunk(b"idx1", index))


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def _list(name: bytes, data: bytes) -> bytes:
    return _chunk(b"LIST", name + data)


@cache
def blank(kind: MediaKind) -> tuple[CountedItem, bytes]:
    """Returns an item of a kind with its file."""
    facts, data = {
        MediaKind.IMAGE: (ImageFacts(64, 64, "PNG"), sample_png(64, 64)),
        MediaKind.AUDIO: (AudioFacts(SAMPLE_RATE, SAMPLE_RATE, "WAV"), sample_wav(SAMPLE_RATE)),
        MediaKind.VIDEO: (VideoFacts(64, 64, 4, FRAME_RATE, "MP4"), sample_avi(64, 64, 4)),
    }[kind]
    return CountedItem("messages", content_hash(data), facts), data
