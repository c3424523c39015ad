"""How much memory a JSON text takes once it is parsed: bounded from above before it is, and measured afterwards."""

from __future__ import annotations

from sys import getsizeof
from typing import Any

from services.gateway.http.json_values import Marks, without_strings

MOST_MEASURED = 4_096
"""Values: a conversation of many messages has fewer, and looking at as many takes less than a millisecond."""

# Bytes, of 64-bit CPython; a test compares them with what the parser really takes.
_PER_VALUE = 40  # a number, and its place in a list
_PER_STRING = 64
_PER_ENTRY = 64  # of an object, in a table that has just grown
_PER_OBJECT = 72
_FIRST_TABLE = 120  # of an object that is not empty
_PER_LIST = 80
_FOUR_BYTE_LEADS = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4")


def parsed_size(text: bytes | bytearray, most: int | None = None, marks: Marks | None = None) -> int:
    """Returns about how many bytes the Python objects of a JSON text take, rather too many than too few.

    Punctuation within strings is counted like that of the JSON itself, so that prose comes to twice its length and
    code to many times its length. Costs a few searches through the text, microseconds for an ordinary request.

    Args:
        most: whether there are more bytes is what the caller asks: strings are left out where that may decide it.
        marks: of the text, where they have been counted.
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
        + _FIRST_TABLE * min(marks.objects, strings)  # it has a key
        + _PER_LIST * marks.lists
    )


def _width(text: bytes | bytearray) -> int:
    """Returns the most bytes that a character of a string may take: one wide character makes all of them wide."""
    escapes = b"\\" in text and b"\\u" in text
    if text.isascii() and not escapes:
        return 1
    if any(lead in text for lead in _FOUR_BYTE_LEADS) or (escapes and (b"\\ud" in text or b"\\uD" in text)):
        return 4
    return 2


def measured_size(parsed: Any) -> int | None:
    """Returns how many bytes the objects of a parsed JSON text take; None when there are more than `MOST_MEASURED`."""
    size, values, waiting = 0, 1, [parsed]
    while waiting:
        value = waiting.pop()
        size += getsizeof(value)
        if isinstance(value, dict):
            values += 2 * len(value)
            if values > MOST_MEASURED:
                return None
            waiting += value
            waiting += value.values()
        elif isinstance(value, list):
            values += len(value)
            if values > MOST_MEASURED:
                return None
            waiting += value
    return size
