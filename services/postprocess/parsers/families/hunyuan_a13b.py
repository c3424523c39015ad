"""Hunyuan A13B: the calls of Jamba, and answers between tags after the thought."""

from __future__ import annotations

from services.postprocess.parsers.base import Chain, Parser, ParserContext
from services.postprocess.parsers.events import Content, Event, PlainKind
from services.postprocess.parsers.families.arrays import JambaParser
from services.postprocess.parsers.families.family import Family
from services.postprocess.parsers.reasoning.think import ThinkParser
from services.postprocess.parsers.scanning.markers import MAX_SPACES, Markers, WhitespaceBuffer

START, END, CALLS = "<answer>", "</answer>", "<tool_calls>"
_END = Markers(END)

_OPENING, _ANSWER, _CLOSING, _TEXT = range(4)


class AnswerParser(Parser):
    """Omits the tags around an answer; everywhere else they are text.

    The closing tag ends the answer if the output, or calls, follow.
    """

    markers = frozenset((START, END))

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._state = _OPENING
        self._buffer = ""
        self._gate = WhitespaceBuffer()

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        if self._state == _OPENING:
            self._open()
        parts: list[str] = []
        while self._buffer and self._step(parts):
            pass
        whole = "".join(parts)
        return [Content(whole)] if whole else []

    def _step(self, parts: list[str]) -> bool:
        """Parses the next part of the buffer; returns False if more text is needed."""
        if self._state == _OPENING:
            return False
        if self._state == _CLOSING:
            return self._close(parts)
        if self._state == _TEXT:
            parts.append(self._buffer)
            self._buffer = ""
            return False
        before, marker, self._buffer = _END.split(self._buffer)
        parts.append(self._gate.text(before) if before else "")
        if marker:
            self._state = _CLOSING
        return bool(marker)

    def plain(self, text: str) -> PlainKind:
        if self._state == _TEXT:
            return Content
        answers = self._state == _ANSWER and not self._buffer and _END.absent(text)
        return Content if answers and self._gate.passes(text) else None

    def _open(self) -> None:
        begun = self._buffer.lstrip()
        if len(self._buffer) - len(begun) > MAX_SPACES or not (begun.startswith(START) or START.startswith(begun)):
            self._state = _TEXT
        elif begun.startswith(START):
            text = begun.removeprefix(START).lstrip()
            self._state, self._buffer = (_ANSWER, text) if text else (_OPENING, START)

    def _close(self, parts: list[str]) -> bool:
        """Omits the closing tag if calls follow it, or returns it if other text does."""
        follows = self._buffer.lstrip()
        if len(self._buffer) - len(follows) <= MAX_SPACES:
            if follows.startswith(CALLS):
                self._gate.marker()
                self._state, self._buffer = _TEXT, follows
                return True
            if CALLS.startswith(follows):
                return False
        parts.append(self._gate.flush() + END)
        self._state = _ANSWER
        return True

    def finish(self) -> list[Event]:
        closed = self._state == _CLOSING and not self._buffer.strip()
        opened = self._state == _OPENING and self._buffer.strip() == START
        return [] if closed or opened or not self.held else [Content(self.held)]

    @property
    def held(self) -> str:
        return self._gate.held + END * (self._state == _CLOSING) + self._buffer


class HunyuanThinkParser(Chain):
    """Parses `<think>…</think><answer>…</answer>`."""

    markers = ThinkParser.markers | AnswerParser.markers

    def __init__(self, context: ParserContext) -> None:
        super().__init__(ThinkParser(context), AnswerParser(context))


FAMILY = Family(
    name="hunyuan_a13b",
    tool=JambaParser,
    reasoning=HunyuanThinkParser,
    aliases=("hunyuan",),
    hints=(CALLS,),
    reasoning_hints=(START,),
)
