"""Image files for tests, good and bad."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

from PIL import Image


def image_file(
    width: int, height: int, form: str = "PNG", color: tuple[int, int, int] = (200, 30, 60), orientation: int = 0
) -> bytes:
    """Returns an encoded image of one color.

    Args:
        orientation: of EXIF; 0 for none.
    """
    image = Image.new("RGB", (width, height), color)
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    file = BytesIO()
    image.save(file, form, **({"exif": exif} if orientation else {}))
    return file.getvalue()


def png_declaring(width: int, height: int, data: bytes = b"") -> bytes:
    """Returns a PNG whose header declares a size, with any compressed data."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def png_bomb(width: int, height: int) -> bytes:
    """Returns a small PNG of one color with many pixels."""
    packer = zlib.compressobj(9)
    row = b"\0" * (1 + 3 * width)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    return png_declaring(width, height, data)


def jpeg_of_scans(width: int, height: int, scans: int) -> bytes:
    """Returns a progressive JPEG whose last scan is repeated: each takes a few bytes and a pass over all pixels."""
    file = BytesIO()
    Image.new("L", (width, height), 128).save(file, "JPEG", progressive=True, quality=50)
    data = file.getvalue()
    own = data.count(b"\xff\xda")
    return data[:-2] + data[data.rfind(b"\xff\xda") : -2] * (scans - own) + data[-2:]


def gif_of_frames(frames: int, side: int = 1) -> bytes:
    """Returns a GIF with frames of one pixel on a square canvas."""
    head = b"GIF89a" + struct.pack("<HHBBB", side, side, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return head + frame * frames + b"\x3b"
