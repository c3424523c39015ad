"""Incremental search for markers in text, holding back as little as possible."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

PIECE_CHARS = 4_096
"""Maximum text that a parser processes in one step, which bounds the cost of copying the rest of its buffer."""

MAX_SPACES = 1_024
"""Maximum white space around a marker that belongs to it; a longer run is text."""


def pieces_of(text: str) -> Iterable[str]:
    """Splits a text into pieces of at most PIECE_CHARS characters."""
    return (text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS))


class TextBuffer:
    """Text to which pieces are appended in constant time.

    Attributes:
        size: number of characters.
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
        """The complete text; takes linear time."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def take(self) -> str:
        """Returns the complete text and clears the buffer."""
        text = self.text
        self.clear()
        return text

    def clear(self) -> None:
        """Clears the buffer."""
        if self.size:
            self._parts, self.size = [], 0


class Found(NamedTuple):
    """A text split at its first marker: `rest` follows the marker, or may become one if `marker` is empty."""

    before: str
    marker: str
    rest: str


class Markers:
    """A set of fixed strings to search for, none of which is a prefix of another."""

    def __init__(self, *markers: str) -> None:
        self._search = re.compile("|".join(map(re.escape, markers))).search
        self._beginnings = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
        self._first = tuple({marker[0] for marker in markers})
        self._longest = max(map(len, markers)) - 1

    def absent(self, text: str) -> bool:
        """Returns whether a text has none of the characters that begin a marker."""
        for character in self._first:  # noqa: SIM110  # faster than a generator, for the one to three there are
            if character in text:
                return False
        return True

    def find(self, text: str, at: int) -> tuple[int, str]:
        """Returns the offset of the first marker from `at`, and the marker.

        Without one, returns the offset of an incomplete marker at the end of the text, or its end, and an empty text.
        """
        if found := self._search(text, at):
            return found.start(), found[0]
        for start in range(max(len(text) - self._longest, at), len(text)):
            if text[start] in self._first and text[start:] in self._beginnings:
                return start, ""
        return len(text), ""

    def split(self, text: str) -> Found:
        """Splits a text at the first marker, or before an incomplete one at its end."""
        if self.absent(text):
            return Found(text, "", "")
        if found := self._search(text):
            return Found(text[: found.start()], found[0], text[found.end() :])
        for start in range(max(len(text) - self._longest, 0), len(text)):
            if text[start] in self._first and text[start:] in self._beginnings:
                return Found(text[:start], "", text[start:])
        return Found(text, "", "")


class WhitespaceBuffer:
    """Holds white space back until text or a marker follows."""

    __slots__ = ("_over", "held")

    def __init__(self) -> None:
        self.held = ""
        self._over = False  # the current run of white space is too long to belong to a marker

    def passes(self, text: str) -> bool:
        """Returns whether `text` would return exactly this text, without a change of state."""
        return not self.held and not self._over and not text[-1].isspace()

    def text(self, text: str) -> str:
        """Adds text; returns the certain part."""
        whole = self.held + text
        end = len(whole.rstrip())
        if end > 0:
            self._over = False
        if self._over or len(whole) - end > MAX_SPACES:
            self._over, self.held = True, ""
            return whole
        self.held = whole[end:]
        return whole[:end]

    def marker(self) -> None:
        """Drops the held white space, which belongs to the marker that follows."""
        self.held, self._over = "", False

    def flush(self) -> str:
        """Returns the held white space at the end of the text."""
        held, self.held = self.held, ""
        return held
