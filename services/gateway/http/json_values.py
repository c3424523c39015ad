"""How many values a JSON text holds, counted in its bytes before it is parsed.

Parsing builds a Python object for each value, and a list of 3 bytes becomes one of 80. Counting characters costs 2 ns a
byte and builds nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from services.common.budgets import Budget

MANY = 10
"""What a list, an object or a string counts, next to the 1 of a number: about their shares of time and memory."""


class Marks(NamedTuple):
    """How many there are of each mark that structures JSON in a text; counted once, for all that is decided by it."""

    commas: int
    colons: int
    lists: int
    objects: int
    quotes: int

    @classmethod
    def of(cls, text: bytes | bytearray) -> Marks:
        """Counts the marks of a text, those within its strings among them."""
        return cls(text.count(b","), text.count(b":"), text.count(b"["), text.count(b"{"), text.count(b'"'))

    @property
    def strings(self) -> int:
        """The strings at most."""
        return self.quotes // 2

    @property
    def weight(self) -> int:
        """What the values beside strings count in `check_values`."""
        return self.commas + MANY * (self.lists + self.objects)


def check_values(text: bytes | bytearray, budget: Budget, marks: Marks | None = None) -> None:
    """Refuses a JSON text that holds too many values.

    Args:
        text: JSON, or what claims to be.
        budget: in units of a number; lists, objects and strings count `MANY`, names in objects are strings.
        marks: of the text, where they have been counted.

    Raises:
        SluiceError: INVALID_ARGUMENT.
    """
    limit = budget.limit
    if MANY * len(text) <= limit:
        return
    marks = marks or Marks.of(text)
    if marks.weight + MANY * marks.strings <= limit:
        return
    # What looks like values may be characters of strings.
    outside, strings = without_strings(text, limit // MANY)
    if MANY * strings > limit or Marks.of(outside).weight + MANY * strings > limit:
        raise budget.refuse(
            f"The request body holds too many values: numbers count 1, lists, objects and strings {MANY}, and "
            f"{limit} is the limit"
        )


def most_nodes(text: bytes | bytearray, limit: int) -> int:
    """Returns how many values a JSON text holds at most, names in objects not among them.

    Args:
        limit: whether there are more is what the caller asks; strings are left out only where that may decide it.
    """
    nodes = _nodes(text)
    if nodes <= limit:
        return nodes
    outside, strings = without_strings(text, 2 * limit)
    return max(_nodes(outside), strings // 2)  # a value has at most two strings: its name, and itself


def without_strings(text: bytes | bytearray, most: int) -> tuple[bytes, int]:
    """Returns a JSON text without its strings, and their number.

    Args:
        most: with more strings than this, no text is returned with their number.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = text.count(b'"') // 2
    return (b"", strings) if strings > most else (b"".join(text.split(b'"')[::2]), strings)


def _nodes(text: bytes | bytearray) -> int:
    """Returns the values of a text without strings: one, and those that follow a comma or begin a list or an object."""
    filled = text.count(b"[") + text.count(b"{") - text.count(b"[]") - text.count(b"{}")
    return 1 + text.count(b",") + filled
