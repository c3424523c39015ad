"""The memory of a parsed JSON text: an upper bound before parsing."""

from __future__ import annotations

from services.common.net.intake.json_values import Marks, without_strings

EXACT_FROM = 4 << 10
"""Minimum length of texts whose strings are left out; in shorter ones their punctuation counts as structure; bytes."""

# Bytes on 64-bit CPython; a test compares them with actual memory use.
_PER_VALUE = 40  # a number and its list slot
_PER_STRING = 64
_PER_ENTRY = 64  # of an object whose hash table has just grown
_PER_OBJECT = 72
_FIRST_TABLE = 120  # of a non-empty object
_PER_LIST = 80
_FOUR_BYTE_LEADS = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4")


def parsed_size(text: bytes | bytearray, marks: Marks | None = None) -> int:
    """Returns an upper estimate, in bytes, of the Python objects of a JSON text.

    Takes a few scans of the text, microseconds for an ordinary request.

    Args:
        marks: marks of the text, if already counted.
    """
    marks = marks or Marks.of(text)
    if not marks.exact and len(text) >= EXACT_FROM:
        outside, strings = without_strings(text, len(text))
        marks = Marks.of(outside)._replace(quotes=2 * strings)
    return (
        _width(text) * len(text)
        + _PER_VALUE * marks.commas
        + _PER_STRING * marks.strings
        + _PER_ENTRY * min(marks.colons, marks.strings)
        + _PER_OBJECT * marks.objects
        + _FIRST_TABLE * min(marks.objects, marks.strings)  # one with a key
        + _PER_LIST * marks.lists
    )


def _width(text: bytes | bytearray) -> int:
    """Returns the maximum bytes per character of a string; one wide character makes the whole string wide."""
    escapes = b"\\" in text and b"\\u" in text
    if text.isascii() and not escapes:
        return 1
    if any(lead in text for lead in _FOUR_BYTE_LEADS) or (escapes and (b"\\ud" in text or b"\\uD" in text)):
        return 4
    return 2
