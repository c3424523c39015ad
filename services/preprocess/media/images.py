"""Checks image files completely; runs in a process with limits, because files may be made to exhaust their readers."""

from __future__ import annotations

import re
import warnings
from io import BytesIO
from struct import error as StructError

from PIL import BmpImagePlugin, GifImagePlugin, Image, JpegImagePlugin, MpoImagePlugin, PngImagePlugin, WebPImagePlugin

from services.common.types.media.facts import UNKNOWN_FORMAT, BadMedia, ImageFacts
from services.preprocess.media.limits import ImageLimits

PLUGINS = (BmpImagePlugin, GifImagePlugin, JpegImagePlugin, MpoImagePlugin, PngImagePlugin, WebPImagePlugin)
"""All readers that files can reach; loaded before the limits apply."""
_MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
)
_JPEG_REDUCTION = 8
"""JPEG files are decoded at this fraction of their size: reads every byte, with half of the work."""
MAX_SCANS = 32
"""Passes over the pixels of a JPEG file, of which encoders write up to 14; a file with more is refused."""
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_BARE_MARKERS = frozenset((0x01, *range(0xD0, 0xD9)))
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)


def sniff(data: bytes) -> str:
    """Returns the format that the first bytes of a file declare; empty for others than those of images."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((name for magic, name in _MAGIC if data.startswith(magic)), "")


def check_image(data: bytes, limits: ImageLimits) -> ImageFacts:
    """Decodes the first frame of a file and returns its facts; raises BadMedia."""
    form = sniff(data)
    if not form:
        raise BadMedia(UNKNOWN_FORMAT)
    if form == "GIF":
        _check_gif(data, limits.frames)
    if form == "PNG":
        _check_png(data)
    if form == "JPEG":
        _check_jpeg(data)
    if form == "WEBP" and int.from_bytes(data[4:8], "little") + 8 > len(data):
        raise BadMedia("is truncated")
    Image.MAX_IMAGE_PIXELS = None  # checked below, with the same error for all formats
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(BytesIO(data), formats=(form,)) as image:
                _check_size(image.size, limits)
                if getattr(image, "n_frames", 1) > limits.frames and form != "JPEG":
                    raise BadMedia(f"has more than {limits.frames} frames")
                width, height = image.size
                if form == "JPEG":  # keeps its declared size; the others' may change when they are read
                    image.draft(None, (max(1, width // _JPEG_REDUCTION), max(1, height // _JPEG_REDUCTION)))
                    image.load()
                else:
                    image.load()
                    _check_size(image.size, limits)
                    width, height = image.size
                sideways = image.getexif().get(_ORIENTATION) in _SIDEWAYS
    except (BadMedia, MemoryError):
        raise
    except (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, StructError) as error:
        raise BadMedia("is broken or truncated") from error
    return ImageFacts(height, width, form) if sideways else ImageFacts(width, height, form)


def _check_size(size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise BadMedia("has no pixels")
    if max(size) > limits.side:
        raise BadMedia(f"has a side of more than {limits.side:,} pixels")
    if width * height > limits.pixels:
        raise BadMedia(f"has more than {limits.pixels:,} pixels")


def _check_png(data: bytes) -> None:
    """Walks over the chunks of a PNG file to its end; raises BadMedia for truncated ones."""
    at = 8
    while data[at + 4 : at + 8] != b"IEND":
        at += 12 + int.from_bytes(data[at : at + 4], "big")
        if at + 12 > len(data):
            raise BadMedia("is broken or truncated")


def _check_jpeg(data: bytes) -> None:
    """Walks over the markers of a JPEG file as decoders do; raises BadMedia for many scans."""
    scans = at = 0
    while found := _MARKER.search(data, at):
        at = found.end()
        marker = data[at - 1]
        if marker == _END_OF_IMAGE:
            return
        if marker in _BARE_MARKERS:
            continue
        scans += marker == _START_OF_SCAN
        if scans > MAX_SCANS:
            raise BadMedia(f"has more than {MAX_SCANS} scans")
        at += int.from_bytes(data[at : at + 2], "big")


def _check_gif(data: bytes, most: int) -> None:
    """Walks over the blocks of a GIF file without decoding them; raises BadMedia for truncated ones and many frames."""
    try:
        at = 13 + _table_bytes(data[10])
        frames = 0
        while data[at] != 0x3B:
            if data[at] == 0x21:
                at += 2
            elif data[at] == 0x2C:
                frames += 1
                if frames > most:
                    raise BadMedia(f"has more than {most} frames")
                at += 11 + _table_bytes(data[at + 9])
            else:
                raise BadMedia("is broken or truncated")
            while data[at]:
                at += data[at] + 1
            at += 1
    except IndexError:
        raise BadMedia("is broken or truncated") from None
    if not frames:
        raise BadMedia("has no pixels")


def _table_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0
