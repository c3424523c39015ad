"""Counts the values of a JSON text before parsing.

Parsing creates a Python object for each value; a list of 3 bytes becomes one of 80. Counting characters costs 2 ns per
byte and creates nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from services.common.base.budgets import Budget
from services.common.base.errors import SluiceError

OBJECT_WEIGHT = 10
"""Weight of a list, object or string relative to a number, by their cost in time and memory."""


class Marks(NamedTuple):
    """Number of each structural character in a JSON text.

    Attributes:
        exact: whether those within strings are left out; else they are counted as well.
    """

    commas: int
    colons: int
    lists: int
    objects: int
    quotes: int
    exact: bool = False

    @classmethod
    def of(cls, text: bytes | bytearray) -> Marks:
        """Counts the marks of a text, including those within strings."""
        return cls(text.count(b","), text.count(b":"), text.count(b"["), text.count(b"{"), text.count(b'"'))

    @property
    def strings(self) -> int:
        """Maximum number of strings."""
        return self.quotes // 2

    @property
    def weight(self) -> int:
        """Weight of all values other than strings, as in `check_values`."""
        return self.commas + OBJECT_WEIGHT * (self.lists + self.objects)


def check_values(
    text: bytes | bytearray,
    budget: Budget,
    marks: Marks | None = None,
    *,
    subject: str = "The request body",
    param: str = "",
) -> None:
    """Rejects a JSON text with too many values.

    Args:
        text: JSON, not validated yet.
        budget: limit in units of a number; lists, objects and strings, including names, count `OBJECT_WEIGHT`.
        marks: marks of the text, if already counted.
        subject: what is parsed, as the subject of a sentence; in errors.
        param: the request field at fault; in errors.

    Raises:
        SluiceError: INVALID_ARGUMENT.
    """
    limit = budget.limit
    if OBJECT_WEIGHT * len(text) <= limit:
        return
    marks = marks or Marks.of(text)
    if marks.weight + OBJECT_WEIGHT * marks.strings <= limit:
        return
    # Characters within strings were counted as structure.
    outside, strings = without_strings(text, limit // OBJECT_WEIGHT)
    if OBJECT_WEIGHT * strings > limit or Marks.of(outside).weight + OBJECT_WEIGHT * strings > limit:
        raise too_many_values(budget, subject, param)


def too_many_values(budget: Budget, subject: str, param: str) -> SluiceError:
    """Counts the refusal of a text with too many values, and returns its error."""
    return budget.refuse(
        f"{subject} contains too many values: numbers count 1, lists, objects and strings {OBJECT_WEIGHT}, "
        f"and the limit is {budget.limit}",
        param=param,
    )


def most_nodes(text: bytes | bytearray, limit: int) -> int:
    """Returns an upper bound for the values of a JSON text, not counting names in objects.

    Args:
        limit: threshold that the caller compares with; strings are excluded only if the first bound exceeds it.
    """
    nodes = _nodes(text)
    if nodes <= limit:
        return nodes
    outside, strings = without_strings(text, 2 * limit)
    return max(_nodes(outside), strings // 2)  # a value has at most two strings: its name and itself


def without_strings(text: bytes | bytearray, most: int) -> tuple[bytes, int]:
    """Returns a JSON text without its strings, and their number.

    Args:
        most: maximum number of strings; with more, the returned text is empty.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = text.count(b'"') // 2
    return (b"", strings) if strings > most else (b"".join(text.split(b'"')[::2]), strings)


def _nodes(text: bytes | bytearray) -> int:
    """Returns the number of values of a text without strings: one, plus one per comma and non-empty list or object."""
    filled = text.count(b"[") + text.count(b"{") - text.count(b"[]") - text.count(b"{}")
    return 1 + text.count(b",") + filled
