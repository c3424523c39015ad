"""Gemma 4: calls in an object notation of their own, and reasoning in a channel."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from services.postprocess.parsers.argument_types import ANY, as_json
from services.postprocess.parsers.calls import Body, CallParser, Named
from services.postprocess.parsers.families.family import Call, Family
from services.postprocess.parsers.json_scan import Malformed, skip_spaces
from services.postprocess.parsers.markers import Markers
from services.postprocess.parsers.objects import NAME_AT_MOST, is_name
from services.postprocess.parsers.think import ThinkParser

QUOTE, END = '<|"|>', "<tool_call|>"
DEPTH_AT_MOST = 100
_HEAD = re.compile(r"\s*call:\s*").match
_IN_NAME, _AT_NAME, _IN_TEXT = Markers("{"), Markers(":"), Markers(QUOTE)
_BARE_AT_MOST = 4_096
_BARE_END = re.compile(r"[,}\]]").search

# Expected next.
_NAME, _KEY_OR_END, _KEY, _VALUE, _VALUE_OR_END, _TEXT, _BARE, _MORE = range(8)


class GemmaBody(Body):
    """Body `call:f{x:<|"|>text<|"|>,n:42,inner:{…},list:[…]}`, streamed as JSON."""

    def __init__(self) -> None:
        self._next = _NAME
        self._closers: list[str] = []  # of the objects and arrays that are open

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
        stop, brace = _IN_NAME.find(text, at)
        if stop - at > NAME_AT_MOST:
            raise Malformed(at + NAME_AT_MOST)
        if not brace:
            return at, None
        head = _HEAD(text, at, stop)
        name = text[head.end() : stop].strip() if head else ""
        if not is_name(name):
            raise Malformed(at)
        self._next, self.calling = _KEY_OR_END, True
        self._closers.append("}")
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
        if self._next == _KEY_OR_END:
            self._next = _KEY
            return at, "{"
        return self._value(text, at)

    def _close(self, empty: bool) -> str:
        closer = self._closers.pop()
        opening = "{" if self._next == _KEY_OR_END else ""
        self._next = _MORE
        if not self._closers:
            self.done, self.calling = True, False
        return opening + closer

    def _key(self, text: str, at: int) -> tuple[int, str | None]:
        stop, colon = _AT_NAME.find(text, at)
        if stop - at > NAME_AT_MOST:
            raise Malformed(at + NAME_AT_MOST)
        if not colon:
            return at, None
        key = text[at:stop].strip().removeprefix(QUOTE).removesuffix(QUOTE)
        if not key:
            raise Malformed(at)
        self._next = _VALUE
        return stop + 1, f"{json.dumps(key, ensure_ascii=False)}: "

    def _value(self, text: str, at: int) -> tuple[int, str | None]:
        if text.startswith(QUOTE, at):
            self._next = _TEXT
            return at + len(QUOTE), '"'
        if QUOTE.startswith(text[at:]):
            return at, None
        if text[at] in "{[":
            if len(self._closers) >= DEPTH_AT_MOST:
                raise Malformed(at)
            opens = text[at] == "{"
            self._closers.append("}" if opens else "]")
            self._next = _KEY_OR_END if opens else _VALUE_OR_END
            return at + 1, None if opens else "["
        self._next = _BARE
        return at, None

    def _text(self, text: str, at: int) -> tuple[int, str | None]:
        stop, quote = _IN_TEXT.find(text, at)
        piece = json.dumps(text[at:stop], ensure_ascii=False)[1:-1]
        if quote:
            self._next = _MORE
            return stop + len(QUOTE), piece + '"'
        return stop, piece or None

    def _bare(self, text: str, at: int) -> tuple[int, str | None]:
        """Parses a number, a word, or text without quotes."""
        found = _BARE_END(text, at)
        if found is None or found.start() - at > _BARE_AT_MOST:
            if len(text) - at > _BARE_AT_MOST:
                raise Malformed(at + _BARE_AT_MOST)
            return at, None
        value = text[at : found.start()].strip()
        if not value:
            raise Malformed(at)
        self._next = _MORE
        return found.start(), as_json(value, ANY)

    def close(self) -> str | None:
        if self._next == _MORE and self._closers:
            self.done, self.calling = True, False
            return "".join(reversed(self._closers))
        return None


class GemmaParser(CallParser):
    """Parses `<|tool_call>call:f{x:<|"|>text<|"|>,n:42}<tool_call|>`."""

    starts = ("<|tool_call>",)
    ends = (END,)
    markers = frozenset((*starts, *ends, QUOTE))
    body = GemmaBody


class GemmaThinkParser(ThinkParser):
    """Parses `<|channel>thought … <channel|>`."""

    start = "<|channel>thought"
    end = "<channel|>"

    markers = frozenset(("<|channel>", "<channel|>"))


def _value(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_value(inner)}" for key, inner in value.items()) + "}"
    return "[" + ",".join(map(_value, value)) + "]" if isinstance(value, list) else json.dumps(value)


def _write(calls: Sequence[Call]) -> str:
    return "".join(f"<|tool_call>call:{name}{_value(given)}<tool_call|>" for name, given in calls)


FAMILY = Family(
    name="gemma4",
    markup='<|tool_call>call:NAME{KEY:<|"|>…<|"|>}<tool_call|>',
    tool=GemmaParser,
    reasoning=GemmaThinkParser,
    hints=("<|tool_call>call:", "<tool_call|>"),
    special=("<tool_call|>",),
    reasoning_hints=("<|channel>thought", "<channel|>"),
    examples=(
        '<|channel>thought\nHm 🤔\n<channel|>Look.\n<|tool_call>call:get_weather{city:<|"|>Zürich "🌧️"\n{x}, y:1'
        '<|"|>,days:3,deep:{a:{},b:[1,-2.5e3,true,null,<|"|>z<|"|>]}}<tool_call|><|tool_call>call:f{}<tool_call|>',
        "<|tool_call>call:g{word:Some words,ok:false}<tool_call|> done",
        "<|tool_call>call:f{city:}<tool_call|> more",
        "<|tool_call>no call<tool_call|> more",
        '<|tool_call>call:f{city:<|"|>cut',
    ),
    fragments=(
        "<|tool_call>call:f{",
        "<|tool_call>",
        "<tool_call|>",
        "city:",
        QUOTE,
        '<|"',
        "}",
        "[",
        "]",
        ",",
        "<|channel>thought\n",
        "<channel|>",
    ),
    write=_write,
)
