"""Parses a large JSON text in slices, so that no turn of the event loop does more than a slice's work.

The parser for whole texts, which is written in C, cannot be interrupted. So the text is cut at commas between elements,
its pieces are parsed by that parser, and the containers that hold several pieces are built here. Each byte is scanned
and parsed once; the work of a slice is bounded in bytes and in brackets and strings.

State: a stack with one frame for each container that is open at the scanned position. The outermost frames have a
value, because pieces of them have been parsed; the others are still part of an unparsed piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

SLICE_BYTES = 64 << 10
SLICE_TOKENS = 2_048
"""Brackets and strings scanned in a slice, which takes about a millisecond."""

_SPACE = b" \t\n\r"
_TOKEN = re.compile(rb'[][{}"]')
_CLOSERS = {ord("["): ord("]"), ord("{"): ord("}")}


class SliceError(ValueError):
    """Raised for a text that is not JSON.

    Attributes:
        near: offset of the piece with the fault, bytes.
    """

    def __init__(self, message: str, near: int) -> None:
        super().__init__(message)
        self.near = near


class _Frame:
    """An open container.

    Attributes:
        opener: its bracket.
        at: offset of its bracket.
        start: offset of what is not parsed yet.
        comma: offset of its last comma between elements, -1 if none follows `start`.
        end: offset after its last string or container.
        value: what has been parsed; None until its first piece is.
        follows: whether `start` is directly after an element.
        empty: whether no element has been parsed.
    """

    __slots__ = ("at", "comma", "empty", "end", "follows", "opener", "start", "value")

    def __init__(self, opener: int, at: int) -> None:
        self.opener = opener
        self.at = at
        self.start = self.end = at + 1
        self.comma = -1
        self.value: Any = None
        self.follows = False
        self.empty = True


class SlicedParser:
    """Parses one text; iterate over `slices`, then take `value`.

    Attributes:
        value: the parsed value, equal to that of `orjson.loads`.
    """

    def __init__(self, text: bytes) -> None:
        self.value: Any = None
        self._text = text
        self._masked: bytes | bytearray = text
        self._stack: list[_Frame] = []
        self._blank = True  # whether nothing but space precedes the outermost container

    def slices(self) -> Iterator[None]:
        """Parses the text, with a pause between slices; raises SliceError if it is not JSON."""
        if b"\\" in self._text:
            yield from self._mask()
        yield from self._scan()
        if self._stack:
            raise SliceError("unexpected end of data", len(self._text))

    def _mask(self) -> Iterator[None]:
        """Replaces escapes by as many other characters, so that a quote in the masked text begins or ends a string."""
        text = self._text
        masked, start = bytearray(len(text)), 0
        while start < len(text):
            piece = text[start : start + SLICE_BYTES]
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # an escape that the slice would cut in two
                piece = text[start : start + SLICE_BYTES + 1]
            masked[start : start + len(piece)] = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            start += len(piece)
            yield
        self._masked = masked

    def _scan(self) -> Iterator[None]:
        masked, stack, length = self._masked, self._stack, len(self._masked)
        at, parsed, tokens, done = 0, 0, 0, False
        while at < length and not done:
            window = min(at + SLICE_BYTES, length)
            token = _TOKEN.search(masked, at, window)
            position = token.start() if token else window
            if stack:
                self._mark_comma(stack[-1], position)
            elif self._blank:
                self._blank = not self._text[at:position].strip(_SPACE)
            if position - parsed >= SLICE_BYTES:
                self._parse_pieces()
                parsed, tokens = position, 0
                yield
            elif (tokens := tokens + 1) >= SLICE_TOKENS:
                tokens = 0
                yield
            if token is None:
                at = window
            elif masked[position] == ord('"'):
                at = self._string_end(position)
            else:
                at = position + 1
                done = self._bracket(masked[position], position)
        if not stack and not done:  # a string, a number or a word
            self.value = _loads(self._text, 0)
            return
        for start in range(at, length, SLICE_BYTES):
            if self._text[start : start + SLICE_BYTES].strip(_SPACE):
                raise SliceError("unexpected content after the end", start)
            yield

    def _mark_comma(self, frame: _Frame, position: int) -> None:
        comma = self._masked.rfind(b",", frame.end, position)
        if comma >= 0:
            frame.comma = comma

    def _string_end(self, start: int) -> int:
        end = self._masked.find(b'"', start + 1)
        if end < 0:
            raise SliceError("unterminated string", start)
        if self._stack:
            self._stack[-1].end = end + 1
        else:
            self._blank = False
        return end + 1

    def _bracket(self, bracket: int, position: int) -> bool:
        """Opens or closes a container; returns whether it was the outermost one that closed."""
        stack = self._stack
        if bracket in _CLOSERS:
            if not stack and not self._blank:
                raise SliceError("unexpected character", 0)
            stack.append(_Frame(bracket, position))
            return False
        if not stack or _CLOSERS[stack[-1].opener] != bracket:
            raise SliceError("unexpected closing bracket", position)
        frame = stack.pop()
        if not stack and frame.value is None:
            self.value = _loads(self._text[frame.at : position + 1], frame.at)
        elif frame.value is not None:
            self._take(frame, position, closes=True)
        if stack:
            stack[-1].end = position + 1
            if frame.value is not None:
                stack[-1].start, stack[-1].comma, stack[-1].follows = position + 1, -1, True
        return not stack

    def _parse_pieces(self) -> None:
        """Parses the complete elements of all open containers, from the outermost to the innermost."""
        stack = self._stack
        for level, frame in enumerate(stack):
            child = stack[level + 1] if level + 1 < len(stack) else None
            if frame.value is None:
                if child is None and frame.comma < 0:
                    return  # no complete element yet
                self._build(frame, stack[level - 1] if level else None)
            if frame.comma >= frame.start:
                self._take(frame, frame.comma, closes=False)

    def _build(self, frame: _Frame, parent: _Frame | None) -> None:
        """Creates the value of a frame, and adds it to that of its parent."""
        frame.value = [] if frame.opener == ord("[") else {}
        if parent is None:
            self.value = frame.value
            return
        prefix = self._text[parent.start : frame.at]
        if parent.follows:
            raise SliceError("a comma is missing", parent.start)
        if isinstance(parent.value, list):
            if prefix.strip(_SPACE):
                raise SliceError("unexpected character", parent.start)
            parent.value.append(frame.value)
        else:
            (name,) = _loads(b"{%s null}" % prefix, parent.start) or [None]
            if name is None:
                raise SliceError("a name is missing", parent.start)
            parent.value[name] = frame.value
        parent.empty = False

    def _take(self, frame: _Frame, end: int, *, closes: bool) -> None:
        """Parses the elements of a frame up to `end`, which is that of a comma or of its closing bracket."""
        start, text = frame.start, self._text[frame.start : end]
        blank = not text.strip(_SPACE)
        if blank and (frame.follows or (closes and frame.empty)):
            frame.start, frame.comma, frame.follows = end + 1, -1, False
            return
        if frame.follows:
            text = text.lstrip(_SPACE)
            if not text.startswith(b","):
                raise SliceError("a comma is missing", start)
            text = text[1:]
        if not text.strip(_SPACE):
            raise SliceError("an element is missing", start)
        if isinstance(frame.value, list):
            frame.value += _loads(b"[%s]" % text, start)
        else:
            frame.value.update(_loads(b"{%s}" % text, start))
        frame.start, frame.comma, frame.follows, frame.empty = end + 1, -1, False, False


def _loads(piece: bytes, start: int) -> Any:
    try:
        return orjson.loads(piece)
    except orjson.JSONDecodeError as error:
        raise SliceError(error.msg, start) from None
