"""Gemma 4: calls in an object notation of their own, and reasoning in a channel."""

from __future__ import annotations

import json
import re
from string import hexdigits
from typing import Any

from services.common.base.sendable_text import sendable
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.calls.argument_types import (
    ANY,
    NULLS,
    ArgumentTypes,
    as_json,
    item_of,
    member_of,
    type_of,
)
from services.postprocess.parsers.calls.call_names import MAX_NAME, Named
from services.postprocess.parsers.calls.parser import Body, CallParser
from services.postprocess.parsers.families.family import Family
from services.postprocess.parsers.reasoning.think import ThinkParser
from services.postprocess.parsers.scanning.json_scan import Malformed, skip_spaces
from services.postprocess.parsers.scanning.markers import MAX_SPACES, Markers
from services.postprocess.parsers.scanning.py_literal import quoted

START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MAX_DEPTH = 100
"""Levels of arguments; with more the call is damaged, and becomes text."""
_HEAD = re.compile(r"\s*(?:call)?:\s*").match
_IN_NAME = Markers("{", START, END)
_AT_NAME = Markers(":")
_IN_TEXT = Markers(QUOTE)
_IN_QUOTED = {quote: Markers(quote, "\\", END) for quote in ('"', "'")}
_IN_KEY = {quote: re.compile(rf"(?:[^{quote}\\]|\\.)*", re.DOTALL).match for quote in _IN_QUOTED}
_MAX_BARE = 4_096
_BARE_END = re.compile(r"[,}\]]").search
_WORDS = frozenset(
    ("true", "false", *NULLS)
)  # what they are where the schema asks for a string, too: those have quotes
_JSON_ESCAPES = frozenset('"\\/bfnrt')
_HEX_DIGITS = 4

# Expected next.
_NAME, _KEY_OR_END, _KEY, _COLON, _VALUE, _VALUE_OR_END, _TEXT, _BARE, _MORE = range(9)


class GemmaBody(Body):
    """Body `call:f{x:<|"|>text<|"|>,n:42,inner:{…},list:[…]}`, streamed as JSON.

    Models also write objects and arrays as JSON or Python do: quotes of all three kinds are quotes, of keys and of
    values. A quote within a text of its kind is part of it unless the value ends there. A value without quotes has the
    type of its schema.

    Args:
        types: of the arguments.
    """

    def __init__(self, types: ArgumentTypes) -> None:
        self._types = types
        self._next = _NAME
        self._root: Any = None
        self._schemas: list[Any] = []  # of the open objects and arrays
        self._schema: Any = None  # of the current value
        self._closers: list[str] = []  # of the objects and arrays that are open
        self._quote = ""  # of the current text

    def push(self, text: str, at: int) -> tuple[int, Named | str | None]:
        steps = {_NAME: self._name, _TEXT: self._text, _BARE: self._bare, _KEY: self._key}
        while at < len(text) and not self.done:
            before = at, self._next
            at, found = steps.get(self._next, self._structure)(text, at)
            if found:
                return at, found
            if before == (at, self._next):
                break
        return at, None

    def _name(self, text: str, at: int) -> tuple[int, Named | str | None]:
        stop, edge = _IN_NAME.find(text, at)
        if stop - at > MAX_NAME:
            raise Malformed(at + MAX_NAME)
        if not edge:
            return at, None
        if edge != "{":
            raise Malformed(stop)
        head = _HEAD(text, at, stop)
        name = text[head.end() : stop].strip() if head else ""
        self._next, self.calling = _KEY_OR_END, True
        self._closers.append("}")
        self._root = self._types.parameters(name)
        self._schemas.append(self._root)
        return stop + 1, Named(name)

    def _structure(self, text: str, at: int) -> tuple[int, str | None]:
        """Parses what is between keys and values."""
        at = skip_spaces(text, at)
        if at == len(text):
            return at, None
        char = text[at]
        if self._next in (_MORE, _KEY_OR_END, _VALUE_OR_END) and char == self._closers[-1]:
            return at + 1, self._close(self._next == _KEY_OR_END and len(self._closers) == 1)
        if self._next == _MORE:
            if char != ",":
                raise Malformed(at)
            self._next = _KEY if self._closers[-1] == "}" else _VALUE
            return at + 1, ", "
        if self._next == _COLON:
            if char != ":":
                raise Malformed(at)
            self._next = _VALUE
            return at + 1, None
        if self._next == _KEY_OR_END:
            self._next = _KEY
            return at, "{"
        return self._value(text, at)

    def _close(self, empty: bool) -> str:
        closer = self._closers.pop()
        self._schemas.pop()
        opening = "{" if self._next == _KEY_OR_END else ""
        self._next = _MORE
        if not self._closers:
            self.done, self.calling = True, False
        return opening + closer

    def _key(self, text: str, at: int) -> tuple[int, str | None]:
        begun = skip_spaces(text, at)
        quote = _quote_at(text, begun)
        if quote is None:
            return at, None
        begun += len(quote)
        stop, end = _end_of_key(text, begun, quote)
        if stop - at > MAX_NAME:
            raise Malformed(at + MAX_NAME)
        if not end:
            return at, None
        key = text[begun:stop]
        if quote in _IN_QUOTED:
            key = json.loads(f'"{_unescaped(key)}"')
        elif not quote:
            key = key.strip()
        if not key:
            raise Malformed(at)
        self._next = _COLON if quote else _VALUE
        self._schema = member_of(self._schemas[-1], key, self._root)
        return stop + len(end), f"{sendable(json.dumps(key, ensure_ascii=False))}: "

    def _value(self, text: str, at: int) -> tuple[int, str | None]:
        quote = _quote_at(text, at)
        if quote is None:
            return at, None
        if self._closers[-1] == "]":
            self._schema = item_of(self._schemas[-1], self._root)
        if quote:
            self._next, self._quote = _TEXT, quote
            return at + len(quote), '"'
        if text[at] in "{[":
            if len(self._closers) >= MAX_DEPTH:
                raise Malformed(at)
            opens = text[at] == "{"
            self._closers.append("}" if opens else "]")
            self._schemas.append(self._schema)
            self._next = _KEY_OR_END if opens else _VALUE_OR_END
            return at + 1, None if opens else "["
        self._next = _BARE
        return at, None

    def _text(self, text: str, at: int) -> tuple[int, str | None]:
        if self._quote == QUOTE:
            stop, quote = _IN_TEXT.find(text, at)
            piece = quoted(text[at:stop])
            if quote:
                self._next = _MORE
                return stop + len(QUOTE), piece + '"'
            return stop, piece or None
        stop, mark = _IN_QUOTED[self._quote].find(text, at)
        if stop > at or not mark:
            return stop, quoted(text[at:stop]) or None
        if mark == END:
            raise Malformed(at)
        return _escape(text, at) if mark == "\\" else self._quote_in_text(text, at)

    def _quote_in_text(self, text: str, at: int) -> tuple[int, str | None]:
        """Ends the text at its quote if the value ends there too."""
        follows = skip_spaces(text[: at + 1 + MAX_SPACES], at + 1)
        if follows == len(text) and not self.last:
            return at, None
        if follows == len(text) or text[follows] in ",}]":
            self._next = _MORE
            return at + 1, '"'
        return at + 1, quoted(text[at])

    def _bare(self, text: str, at: int) -> tuple[int, str | None]:
        """Parses a number, a word, or text without quotes."""
        found = _BARE_END(text, at)
        if found is None or found.start() - at > _MAX_BARE:
            if len(text) - at > _MAX_BARE:
                raise Malformed(at + _MAX_BARE)
            return at, None
        value = text[at : found.start()].strip()
        if not value:
            raise Malformed(at)
        self._next = _MORE
        wanted = type_of(self._schema, self._root) if isinstance(self._schema, dict) else ANY
        if wanted.text and value not in _WORDS:
            return found.start(), json.dumps(value, ensure_ascii=False)
        return found.start(), as_json(value, ANY if wanted.text else wanted)

    def close(self) -> str | None:
        if self._next == _MORE and self._closers:
            self.done, self.calling = True, False
            return "".join(reversed(self._closers))
        return None


def _escape(text: str, at: int) -> tuple[int, str | None]:
    """Returns an escape sequence as JSON; a backslash before any other character is one."""
    kind = text[at + 1 : at + 2]
    if not kind:
        return at, None
    if kind == "u":
        stop = at + 2 + _HEX_DIGITS
        if not all(digit in hexdigits for digit in text[at + 2 : stop]):
            return at + 1, quoted("\\")
        return (stop, text[at:stop]) if stop <= len(text) else (at, None)
    if kind in _JSON_ESCAPES:
        return at + 2, text[at : at + 2]
    return (at + 2, kind) if kind == "'" else (at + 1, quoted("\\"))


def _unescaped(text: str) -> str:
    """Returns a complete text in quotes as that of a JSON string."""
    parts, at = [], 0
    while (stop := text.find("\\", at)) >= 0:
        parts.append(quoted(text[at:stop]))
        at, piece = _escape(text, stop)
        if piece is None:
            at, piece = stop + 1, quoted("\\")
        parts.append(piece)
    return "".join((*parts, quoted(text[at:])))


def _end_of_key(text: str, at: int, quote: str) -> tuple[int, str]:
    """Returns where a key ends, and its end mark, empty if that is missing."""
    if quote in ("", QUOTE):
        return (_IN_TEXT if quote else _AT_NAME).find(text, at)
    found = _IN_KEY[quote](text, at)
    assert found is not None
    return found.end(), text[found.end() : found.end() + 1].strip("\\")


def _quote_at(text: str, at: int) -> str | None:
    """Returns the quote that begins at an offset, empty for none; None if that depends on text that is missing."""
    for quote in (QUOTE, *_IN_QUOTED):
        if text.startswith(quote, at):
            return quote
    return None if QUOTE.startswith(text[at:]) else ""


class GemmaParser(CallParser):
    """Parses `<|tool_call>call:f{x:<|"|>text<|"|>,n:42}<tool_call|>`."""

    starts = (START,)
    ends = (END,)
    markers = frozenset((*starts, *ends, QUOTE))

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._types = ArgumentTypes(context.tools)

    def body(self) -> Body:
        return GemmaBody(self._types)


class GemmaThinkParser(ThinkParser):
    """Parses `<|channel>thought … <channel|>`."""

    start = "<|channel>thought"
    more_starts = ("thought\n",)  # where the opening special token is missing
    end = "<channel|>"

    markers = frozenset(("<|channel>", "<channel|>"))


FAMILY = Family(
    name="gemma4",
    tool=GemmaParser,
    reasoning=GemmaThinkParser,
    hints=("<|tool_call>call:", "<tool_call|>"),
    special=("<tool_call|>",),
    reasoning_hints=("<|channel>thought", "<channel|>"),
)
