"""Incremental conversion of Python literals to JSON."""

from __future__ import annotations

import json
import re

from services.common.base.sendable_text import is_surrogate
from services.postprocess.parsers.scanning.json_scan import DEEPEST, Malformed, skip_spaces

_IN_STRING = {quote: re.compile(rf"[^\\{quote}]*").match for quote in "'\""}
_ATOM = re.compile(r"[-+.0-9A-Za-z_]*").match
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?").fullmatch
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
MAX_ATOM = 400
"""Characters of a number or word in the arguments of a tool call as Python; with more they are malformed."""

_PREFIXES = frozenset(("r", "R", "u", "U"))
_BACKSLASH = "\\"

# Expected next; `_QUOTES` and `_AFTER_STRING`: of a string whose opening, or whose end, is not certain.
_VALUE, _FIRST, _KEY, _COLON, _MORE, _QUOTES, _STRING, _AFTER_STRING, _WORD = range(9)


def quoted(text: str) -> str:
    """Returns a text escaped as in a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class PyLiteral:
    """Converts one literal: strings, numbers, True, False, None, lists, tuples, and dictionaries with strings as keys.

    Strings may be raw, in triple quotes, and in several parts. A tuple becomes a list; its text is held until the
    first comma shows that it is not a value in parentheses.

    Attributes:
        done: the literal is complete. Except for lists and dictionaries, that is known at the character after it.
    """

    __slots__ = (
        "_atom",
        "_comma",
        "_escape",
        "_held",
        "_is_key",
        "_next",
        "_open",
        "_parentheses",
        "_quote",
        "_quotes",
        "_raw",
        "done",
    )

    def __init__(self) -> None:
        self._next = _VALUE
        self._open: list[str] = []
        self._quote = ""
        self._quotes = 0  # adjacent ones, of the opening or inside the string
        self._raw = False  # the string is raw
        self._escape = ""
        self._parentheses: list[tuple[int, int]] = []  # depth, and index in `_held`, of those that may be tuples
        self._held: list[str] = []
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
            at, out = self._step(text, at)
            if self._parentheses:
                self._held.append(out)
                out = ""
            elif self._held:
                self._held.append(out)
                out = "".join(self._held)
                self._held = []
        return at, out

    def _step(self, text: str, at: int) -> tuple[int, str]:
        if self._next == _STRING:
            return self._string(text, at)
        if self._next == _WORD:
            return self._word(text, at)
        if self._next == _QUOTES:
            return self._opening(text, at)
        if self._next == _AFTER_STRING:
            return self._after_string(text, at)
        at = skip_spaces(text, at)
        return self._structure(text, at) if at < len(text) else (at, "")

    def close(self) -> str | None:
        """Returns the end of a string that is complete unless another part follows; None for other literals."""
        return '"' if self._next == _AFTER_STRING and not self._open and not self._atom else None

    def _begin_string(self, quote: str, raw: bool) -> None:
        self._next, self._quote, self._quotes, self._raw = _QUOTES, quote, 1, raw

    def _opening(self, text: str, at: int) -> tuple[int, str]:
        if text[at] == self._quote[0]:
            self._quotes += 1
            if self._quotes == 3:
                self._next, self._quote, self._quotes = _STRING, self._quote * 3, 0
            return at + 1, ""
        self._next = _STRING if self._quotes == 1 else _AFTER_STRING
        self._quotes = 0
        return at, ""

    def _string(self, text: str, at: int) -> tuple[int, str]:
        if self._escape:
            return at + 1, self._escaped(text[at], at)
        found = _IN_STRING[self._quote[0]](text, at)
        assert found is not None
        if found[0]:
            lead, self._quotes = self._quote[0] * self._quotes, 0
            return found.end(), quoted(lead + found[0])
        if text[at] == _BACKSLASH:
            lead, self._quotes = self._quote[0] * self._quotes, 0
            self._escape = _BACKSLASH
            return at + 1, quoted(lead)
        self._quotes += 1
        if self._quotes == len(self._quote):
            self._next, self._quotes = _AFTER_STRING, 0
        return at + 1, ""

    def _after_string(self, text: str, at: int) -> tuple[int, str]:
        """Begins another part of the string, or ends it."""
        if not self._atom:
            at = skip_spaces(text, at)
            if at == len(text):
                return at, ""
        char = text[at]
        if char in "'\"":
            self._begin_string(char, self._atom in ("r", "R"))
            self._atom = ""
            return at + 1, ""
        if self._atom:
            raise Malformed(at)
        if char in _PREFIXES:
            self._atom = char
            return at + 1, ""
        if self._is_key:
            self._next = _COLON
        else:
            self._completed()
        return at, '"'

    def _escaped(self, char: str, at: int) -> str:
        if self._raw:
            self._escape = ""
            return quoted(_BACKSLASH + char)
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
        if kind == "u" or is_surrogate(number):  # kept as an escape sequence, as its other half may follow
            return f"\\u{number:04x}"
        return quoted(chr(number))

    def _word(self, text: str, at: int) -> tuple[int, str]:
        found = _ATOM(text, at)
        assert found is not None
        stop = found.end()
        self._atom += text[at : min(stop, at + MAX_ATOM + 1 - len(self._atom))]
        if stop == len(text):
            return stop, ""
        if self._atom in _PREFIXES and text[stop] in "'\"":
            self._begin_string(text[stop], self._atom in ("r", "R"))
            self._atom = ""
            return stop + 1, '"'
        atom = self._atom if _NUMBER(self._atom) else _WORDS.get(self._atom, "")
        if not atom or len(atom) > MAX_ATOM:
            raise Malformed(stop)
        self._atom = ""
        self._completed()
        return stop, atom

    def _structure(self, text: str, at: int) -> tuple[int, str]:
        char, expected = text[at], self._next
        if self._open and char == self._open[-1] and expected in (_FIRST, _MORE, _KEY):
            return at + 1, self._close(char)
        if expected == _MORE and char == ",":
            self._comma = True
            self._next = _KEY if self._open[-1] == "}" else _FIRST
            self._is_tuple()
            return at + 1, ""
        if expected == _COLON and char == ":":
            self._next = _VALUE
            return at + 1, ": "
        if expected in (_VALUE, _FIRST, _KEY):
            return self._value(char, at)
        raise Malformed(at)

    def _close(self, char: str) -> str:
        if char == ")":
            char = "]"
            if self._next == _FIRST:
                self._is_tuple()
            elif self._parentheses and self._parentheses[-1][0] == len(self._open):
                self._parentheses.pop()
                char = ""
        self._open.pop()
        self._comma = False
        self._completed()
        return char

    def _is_tuple(self) -> None:
        """Opens the list in which a comma, or nothing, was found, if it began with a parenthesis."""
        if self._parentheses and self._parentheses[-1][0] == len(self._open):
            self._held[self._parentheses.pop()[1]] = "["

    def _value(self, char: str, at: int) -> tuple[int, str]:
        lead = ", " if self._comma else ""
        self._is_key = self._next == _KEY
        if char in "'\"":
            self._begin_string(char, False)
            lead += '"'
        elif self._is_key:
            raise Malformed(at)
        elif char in "[{(":
            if len(self._open) == DEEPEST:
                raise Malformed(at)
            if char == "(":
                self._held += [lead, ""]
                self._open.append(")")
                self._parentheses.append((len(self._open), len(self._held) - 1))
                self._next, self._comma = _FIRST, False
                return at + 1, ""
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
