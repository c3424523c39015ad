"""Media items of tokenized prompts: which tokens stand for them, and their files."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256

HASH_BYTES = 16


class MediaKind(IntEnum):
    """Kind of a media item; values as in `sluice.v1.MediaKind`, names in lower case are capabilities of engines."""

    IMAGE = 1
    AUDIO = 2
    VIDEO = 3

    @property
    def capability(self) -> str:
        """Name of the capability of engines that take items of this kind."""
        return self.name.lower()


SAMPLES = {MediaKind.IMAGE: 4, MediaKind.AUDIO: 2, MediaKind.VIDEO: 2}
"""Number of sample items of each kind in a media fingerprint, in its order."""


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """The placeholder tokens of a prompt that stand for a media item.

    Attributes:
        hash: `content_hash` of the encoded file.
        offset: index of the first token.
        length: number of tokens.
        unexpanded_ids: packed u32; in place of the tokens in a prompt that the engine expands. Empty: the same.
        encoder_tokens: work of the encoder in tokens of the prompt.
    """

    kind: MediaKind
    hash: bytes
    offset: int
    length: int
    unexpanded_ids: bytes = b""
    encoder_tokens: int = 0

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.offset + self.length


def items_within(spans: Iterable[MediaSpan], tokens: int) -> int:
    """Returns the number of items whose tokens are all among the first `tokens` of the prompt."""
    return sum(span.end <= tokens for span in spans)


@dataclass(frozen=True, slots=True)
class MediaFile:
    """An encoded media file."""

    hash: bytes
    data: bytes
    media_type: str = ""


def content_hash(data: bytes) -> bytes:
    """Returns the identity of an encoded file: the first 16 bytes of its sha-256."""
    return sha256(data).digest()[:HASH_BYTES]


def png_file(width: int, height: int, pixels: bytes) -> bytes:
    """Returns a PNG file, for samples where no image library is installed.

    Args:
        pixels: row after row, of one byte each for shades of grey, or of three for red, green and blue.
    """
    row = len(pixels) // height
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if row == width else 2, 0, 0, 0)
    rows = zlib.compress(b"".join(b"\0" + pixels[at : at + row] for at in range(0, len(pixels), row)))
    chunks = ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A media item of a prompt: its placeholder tokens, and its file."""

    span: MediaSpan
    file: MediaFile
