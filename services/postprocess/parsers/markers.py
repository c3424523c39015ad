"""Looking for markers in text that comes in pieces, with as little held back as possible."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

PIECE_CHARS = 4_096
"""Longest text that a parser looks at in one step: what it cuts off and copies on the way is bounded by this."""

SPACES_AT_MOST = 1_024
"""White space beside a marker that may belong to it; a longer run is text."""


def pieces_of(text: str) -> Iterable[str]:
    """Returns the text in pieces of at most PIECE_CHARS characters."""
    return (text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS))


class TextBuffer:
    """Text that grows at its end, at a cost that does not depend on its length.

    Attributes:
        size: characters in it.
    """

    __slots__ = ("_parts", "size")

    def __init__(self, text: str = "") -> None:
        self._parts: list[str] = [text] if text else []
        self.size = len(text)

    def __bool__(self) -> bool:
        return self.size > 0

    def add(self, text: str) -> None:
        """Appends a piece."""
        if text:
            self._parts.append(text)
            self.size += len(text)

    @property
    def text(self) -> str:
        """All of it; takes time in proportion to its length."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def take(self) -> str:
        """Returns all of it and empties the buffer."""
        text = self.text
        self.clear()
        return text

    def clear(self) -> None:
        """Empties the buffer."""
        if self.size:
            self._parts, self.size = [], 0


class Found(NamedTuple):
    """A text cut at its first marker: `rest` follows the marker, or may become one when `marker` is empty."""

    before: str
    marker: str
    rest: str


class Markers:
    """Several fixed strings, none of them the beginning of another."""

    def __init__(self, *markers: str) -> None:
        self._search = re.compile("|".join(map(re.escape, markers))).search
        self._beginnings = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
        self._first = frozenset(marker[0] for marker in markers)
        self._longest = max(map(len, markers)) - 1

    def split(self, text: str) -> Found:
        """Cuts at the first marker, or before what may become one."""
        if self._first.isdisjoint(text):
            return Found(text, "", "")
        if found := self._search(text):
            return Found(text[: found.start()], found[0], text[found.end() :])
        for start in range(max(len(text) - self._longest, 0), len(text)):
            if text[start] in self._first and text[start:] in self._beginnings:
                return Found(text[:start], "", text[start:])
        return Found(text, "", "")


class WhitespaceBuffer:
    """Holds white space back until it is known whether text follows it or a marker."""

    __slots__ = ("_over", "held")

    def __init__(self) -> None:
        self.held = ""
        self._over = False  # the run of white space is too long to belong to a marker

    def text(self, text: str) -> str:
        """More text; gives out what is certain."""
        whole = self.held + text
        end = len(whole.rstrip())
        if end > 0:
            self._over = False
        if self._over or len(whole) - end > SPACES_AT_MOST:
            self._over, self.held = True, ""
            return whole
        self.held = whole[end:]
        return whole[:end]

    def marker(self) -> None:
        """A marker follows: what is held belonged to it."""
        self.held, self._over = "", False

    def flush(self) -> str:
        """The end of the text follows."""
        held, self.held = self.held, ""
        return held
