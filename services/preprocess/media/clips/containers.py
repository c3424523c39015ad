"""Finds truncated files of videos by the lengths that their containers declare, without a library.

A reader cannot tell them from complete ones: frames that an edit list hides are missing as well as lost ones, and a
sound track that is longer than the pictures looks like lost pictures.
"""

from __future__ import annotations

_HEAD = 8
"""Bytes of the length and the name of an MP4 box."""
_LONG_HEAD = 16
_LENGTH_FOLLOWS = 1
"""Length of an MP4 box that has a length of 64 bits after its name; 0 stands for the rest of the file."""
_CONTENT = (b"moov", b"moof", b"mdat")
"""MP4 boxes that a video consists of; what is lost of others does no harm."""
_SEGMENT = b"\x18\x53\x80\x67"
_ID_BYTES = 4
"""Bytes of the names of a WebM file's two outermost elements."""


def ends_early(data: bytes, form: str) -> bool:
    """Returns whether an MP4 or WebM file declares more bytes than it has."""
    return _mp4_ends_early(data) if form == "MP4" else _webm_ends_early(data)


def _mp4_ends_early(data: bytes) -> bool:
    at = 0
    while at + _HEAD <= len(data):
        length, least = int.from_bytes(data[at : at + 4], "big"), _HEAD
        if length == _LENGTH_FOLLOWS:
            length, least = int.from_bytes(data[at + _HEAD : at + _LONG_HEAD], "big"), _LONG_HEAD
        if length < least:
            return False
        if at + length > len(data):
            return data[at + 4 : at + _HEAD] in _CONTENT
        at += length
    return False


def _webm_ends_early(data: bytes) -> bool:
    """Returns whether the segment, which has all but the header, is cut; files of live encoders declare no length."""
    at, length, known = _content_of(data, 0)
    start = at + length
    if not known or data[start : start + _ID_BYTES] != _SEGMENT:
        return False
    at, length, known = _content_of(data, start)
    return known and at + length > len(data)


def _content_of(data: bytes, at: int) -> tuple[int, int, bool]:
    """Returns where the content of an element begins, its length, and whether the length is known."""
    at += _ID_BYTES
    width = 9 - data[at].bit_length() if at < len(data) else 0
    most = (1 << 7 * width) - 1
    length = int.from_bytes(data[at : at + width], "big") & most
    return at + width, length, length != most
