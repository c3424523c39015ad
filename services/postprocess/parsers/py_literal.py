"""Incremental conversion of Python literals to JSON."""

from __future__ import annotations

import json
import re

from services.postprocess.parsers.json_scan import DEEPEST, Malformed, skip_spaces

_IN_STRING = {quote: re.compile(rf"[^\\{quote}]*").match for quote in "'\""}
_ATOM = re.compile(r"[-+.0-9A-Za-z_]*").match
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?").fullmatch
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
LONGEST_ATOM = 400

# Expected next.
_VALUE, _FIRST, _KEY, _COLON, _MORE, _STRING, _WORD = range(7)


def quoted(text: str) -> str:
    """Returns a text escaped as in a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class PyLiteral:
    """Converts one literal: strings, numbers, True, False, None, lists, and dictionaries with strings as keys.

    Attributes:
        done: the literal is complete. A number or word is complete at the character after it.
    """

    __slots__ = ("_atom", "_comma", "_escape", "_is_key", "_next", "_open", "_quote", "done")

    def __init__(self) -> None:
        self._next = _VALUE
        self._open: list[str] = []
        self._quote = ""
        self._escape = ""
        self._atom = ""
        self._comma = False  # written when another element follows
        self._is_key = False
        self.done = False

    def push(self, text: str, at: int) -> tuple[int, str]:
        """Parses from `at` up to the next piece of JSON.

        Returns:
            Where it stopped, and the JSON, which is empty only at the end of `text` or of the literal.

        Raises:
            Malformed: with the offset of the first invalid character.
        """
        out = ""
        while at < len(text) and not out and not self.done:
            if self._next == _STRING:
                at, out = self._string(text, at)
            elif self._next == _WORD:
                at, out = self._word(text, at)
            else:
                at = skip_spaces(text, at)
                if at < len(text):
                    at, out = self._structure(text, at)
        return at, out

    def _string(self, text: str, at: int) -> tuple[int, str]:
        if self._escape:
            return at + 1, self._escaped(text[at], at)
        found = _IN_STRING[self._quote](text, at)
        assert found is not None
        if found[0]:
            return found.end(), quoted(found[0])
        if text[at] == "\\":
            self._escape = "\\"
            return at + 1, ""
        if self._is_key:
            self._next = _COLON
        else:
            self._completed()
        return at + 1, '"'

    def _escaped(self, char: str, at: int) -> str:
        self._escape += char
        kind = self._escape[1]
        digits = _HEX_DIGITS.get(kind, 0)
        if len(self._escape) > 2 and char not in "0123456789abcdefABCDEF":
            raise Malformed(at)
        if len(self._escape) < 2 + digits:
            return ""
        escape, self._escape = self._escape, ""
        if not digits:
            return quoted(_ESCAPES.get(kind, kind if kind in "'\"\\" else escape))
        number = int(escape[2:], 16)
        if number > 0x10FFFF:
            raise Malformed(at)
        return escape.lower() if kind == "u" else quoted(chr(number))

    def _word(self, text: str, at: int) -> tuple[int, str]:
        found = _ATOM(text, at)
        assert found is not None
        stop = found.end()
        self._atom += text[at : min(stop, at + LONGEST_ATOM + 1 - len(self._atom))]
        if stop == len(text):
            return stop, ""
        atom = self._atom if _NUMBER(self._atom) else _WORDS.get(self._atom, "")
        if not atom or len(atom) > LONGEST_ATOM:
            raise Malformed(stop)
        self._atom = ""
        self._completed()
        return stop, atom

    def _structure(self, text: str, at: int) -> tuple[int, str]:
        char, expected = text[at], self._next
        if (
            self._open
            and char == self._open[-1]
            and expected in (_FIRST, _MORE, _KEY, _VALUE)
            and not self._after_colon
        ):
            self._open.pop()
            self._comma = False
            self._completed()
            return at + 1, char
        if expected == _MORE and char == ",":
            self._comma = True
            self._next = _KEY if self._open[-1] == "}" else _FIRST
            return at + 1, ""
        if expected == _COLON and char == ":":
            self._next = _VALUE
            return at + 1, ": "
        if expected in (_VALUE, _FIRST, _KEY):
            return self._value(char, at)
        raise Malformed(at)

    @property
    def _after_colon(self) -> bool:
        return self._next == _VALUE

    def _value(self, char: str, at: int) -> tuple[int, str]:
        lead = ", " if self._comma else ""
        self._is_key = self._next == _KEY
        if char in "'\"":
            self._next, self._quote, lead = _STRING, char, lead + '"'
        elif self._is_key:
            raise Malformed(at)
        elif char in "[{":
            if len(self._open) == DEEPEST:
                raise Malformed(at)
            self._open.append("]" if char == "[" else "}")
            self._next, lead = _FIRST if char == "[" else _KEY, lead + char
        elif char.isascii() and (char.isalnum() or char in "-."):
            self._next, self._comma = _WORD, False
            return at, lead
        else:
            raise Malformed(at)
        self._comma = False
        return at + 1, lead

    def _completed(self) -> None:
        self._next = _MORE
        self.done = not self._open
