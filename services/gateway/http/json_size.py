"""The memory of a parsed JSON text: an upper bound before parsing, and a measurement after it."""

from __future__ import annotations

from sys import getsizeof
from typing import Any

from services.gateway.http.json_values import Marks, without_strings

MAX_MEASURED = 4_096
"""Maximum number of values measured, which takes less than a millisecond; long conversations have fewer."""

# Bytes on 64-bit CPython; a test compares them with actual memory use.
_PER_VALUE = 40  # a number and its list slot
_PER_STRING = 64
_PER_ENTRY = 64  # of an object whose hash table has just grown
_PER_OBJECT = 72
_FIRST_TABLE = 120  # of a non-empty object
_PER_LIST = 80
_FOUR_BYTE_LEADS = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4")


def parsed_size(text: bytes | bytearray, most: int | None = None, marks: Marks | None = None) -> int:
    """Returns an upper estimate, in bytes, of the Python objects of a JSON text.

    Counts punctuation within strings as structure, so prose is estimated at twice its length and code at many times
    its length. Takes a few scans of the text, microseconds for an ordinary request.

    Args:
        most: threshold that the caller compares with; strings are excluded only if the first estimate exceeds it.
        marks: marks of the text, if already counted.
    """
    texts = _width(text) * len(text)
    marks = marks or Marks.of(text)
    size = texts + _objects_size(marks, marks.strings)
    if most is None or size <= most:
        return size
    outside, strings = without_strings(text, most // _PER_STRING)
    return texts + _objects_size(Marks.of(outside), strings)


def _objects_size(marks: Marks, strings: int) -> int:
    return (
        _PER_VALUE * marks.commas
        + _PER_STRING * strings
        + _PER_ENTRY * min(marks.colons, strings)
        + _PER_OBJECT * marks.objects
        + _FIRST_TABLE * min(marks.objects, strings)  # one with a key
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


def measured_size(parsed: Any) -> int | None:
    """Returns the size in bytes of parsed JSON; None for more than `MAX_MEASURED` values."""
    size, values, pending = 0, 1, [parsed]
    while pending:
        value = pending.pop()
        size += getsizeof(value)
        if isinstance(value, dict):
            values += 2 * len(value)
            if values > MAX_MEASURED:
                return None
            pending += value
            pending += value.values()
        elif isinstance(value, list):
            values += len(value)
            if values > MAX_MEASURED:
                return None
            pending += value
    return size
