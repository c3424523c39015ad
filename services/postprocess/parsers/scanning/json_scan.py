"""Incremental scanner of JSON values: finds the end of a value, or the first invalid character."""

from __future__ import annotations

import json
import re

DEEPEST = 200

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*').match
_SPACES = re.compile(r"[ \t\n\r]*").match
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*").match
_IS_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null").fullmatch
_MAX_SCALAR = 400
"""Characters of a number or word in the arguments of a tool call as JSON; with more they are malformed."""

# Expected next.
_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _MORE, _STRING, _NAME, _ATOM = range(9)


class Malformed(Exception):
    """The text violates the format; `at` is the offset in the pushed piece."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


def skip_spaces(text: str, at: int) -> int:
    """Returns the first offset from `at` that is not white space."""
    found = _SPACES(text, at)
    assert found is not None
    return found.end()


class JsonValue:
    """Scans one JSON value strictly, except that `read` accepts control characters in strings.

    Attributes:
        done: the value is complete. A number or word is complete at the character after it.
    """

    __slots__ = ("_atom", "_control", "_escape", "_next", "_open", "done")

    def __init__(self) -> None:
        self._next = _VALUE
        self._open: list[str] = []
        self._escape = 0  # characters missing in the current escape sequence; -1: the first one
        self._atom = ""
        self._control = False  # the character after the scanned text is a control character in a string
        self.done = False

    def push(self, text: str, at: int) -> int:
        """Scans from `at`; returns where it stopped, which is the end of `text` unless `done`.

        Raises:
            Malformed: with the offset of the first invalid character.
        """
        at = self._scan(text, at)
        if self._control:
            raise Malformed(at)
        return at

    def read(self, text: str, at: int) -> tuple[int, str, bool]:
        """Scans from `at` up to the first control character in a string, such as a line break, which it escapes.

        Returns:
            Where it stopped, the text as valid JSON, and whether that differs from what was written.

        Raises:
            Malformed: with the offset of the first invalid character.
        """
        stop = self._scan(text, at)
        if not self._control:
            return stop, text[at:stop], False
        self._control = False
        return stop + 1, text[at:stop] + json.dumps(text[stop])[1:-1], True

    def _scan(self, text: str, at: int) -> int:
        end = len(text)
        while at < end and not self.done and not self._control:
            expected = self._next
            if expected in (_STRING, _NAME):
                at = self._string(text, at)
            elif expected == _ATOM:
                at = self._scalar(text, at)
            else:
                at = skip_spaces(text, at)
                if at < end:
                    at = self._structure(text, at, expected)
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escape:
            return self._escaped(text, at)
        found = _IN_STRING(text, at)
        assert found is not None
        at = found.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escape = -1
        elif text[at] == '"':
            if self._next == _NAME:
                self._next = _COLON
            else:
                self._completed()
        else:
            self._control = True
            return at
        return at + 1

    def _escaped(self, text: str, at: int) -> int:
        char = text[at]
        if self._escape > 0:
            if char not in "0123456789abcdefABCDEF":
                raise Malformed(at)
            self._escape -= 1
        elif char == "u":
            self._escape = 4
        elif char in '"\\/bfnrt':
            self._escape = 0
        else:
            raise Malformed(at)
        return at + 1

    def _scalar(self, text: str, at: int) -> int:
        found = _SCALAR(text, at)
        assert found is not None
        stop = found.end()
        self._atom += text[at : min(stop, at + _MAX_SCALAR + 1 - len(self._atom))]
        if stop < len(text):
            if len(self._atom) > _MAX_SCALAR or not _IS_SCALAR(self._atom):
                raise Malformed(stop)
            self._atom = ""
            self._completed()
        return stop

    def _structure(self, text: str, at: int, expected: int) -> int:
        char = text[at]
        if expected in (_VALUE, _VALUE_OR_END):
            if char == "]" and expected == _VALUE_OR_END:
                self._close()
            else:
                return self._value(char, at)
        elif expected in (_KEY, _KEY_OR_END):
            if char == '"':
                self._next = _NAME
            elif char == "}" and expected == _KEY_OR_END:
                self._close()
            else:
                raise Malformed(at)
        elif expected == _COLON and char == ":":
            self._next = _VALUE
        elif expected == _MORE and char == ",":
            self._next = _KEY if self._open[-1] == "}" else _VALUE
        elif expected == _MORE and char == self._open[-1]:
            self._close()
        else:
            raise Malformed(at)
        return at + 1

    def _value(self, char: str, at: int) -> int:
        if char == "{":
            self._nest("}", _KEY_OR_END, at)
        elif char == "[":
            self._nest("]", _VALUE_OR_END, at)
        elif char == '"':
            self._next = _STRING
        elif char in "-0123456789tfn":
            self._next = _ATOM
            return at
        else:
            raise Malformed(at)
        return at + 1

    def _nest(self, closing: str, expected: int, at: int) -> None:
        if len(self._open) == DEEPEST:
            raise Malformed(at)
        self._open.append(closing)
        self._next = expected

    def _close(self) -> None:
        self._open.pop()
        self._completed()

    def _completed(self) -> None:
        self._next = _MORE
        self.done = not self._open
