"""Parsers of reasoning between tags such as `<think>…</think>` before the content."""

from __future__ import annotations

from typing import ClassVar

from services.postprocess.parsers.base import Parser, ParserContext
from services.postprocess.parsers.events import Content, Event, PlainKind, Reasoning
from services.postprocess.parsers.markers import PIECE_CHARS, Markers, TextBuffer, WhitespaceBuffer, pieces_of

_OPENING, _THINKING, _AFTER, _ANSWER = range(4)


class ThinkParser(Parser):
    """Parses one block of reasoning at the beginning of the output; white space around the tags belongs to them.

    The block starts if the prompt ends with the opening tag, or the output begins with it. If the prompt ends with the
    closing tag, reasoning is disabled and all output is content. Output constrained by a grammar is content, even if
    the prompt ends with the opening tag.

    Attributes:
        start, end: the tags.
        more_starts, more_ends: other spellings of the tags.
        implied: the model reasons even without the opening tag.
    """

    start: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"
    more_starts: ClassVar[tuple[str, ...]] = ()
    more_ends: ClassVar[tuple[str, ...]] = ()
    implied: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._starts = (cls.start, *cls.more_starts)
        cls._tags = Markers(cls.end, *cls.more_ends)
        own: frozenset[str] = cls.__dict__.get("markers", frozenset())
        cls.markers = own | {*cls._starts, cls.end, *cls.more_ends}

    _starts: ClassVar[tuple[str, ...]] = (start,)
    _tags: ClassVar[Markers] = Markers(end)
    markers = frozenset((start, end))

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        tail = context.prompt_tail.rstrip()
        opened = tail.endswith(self._starts)
        closed = tail.endswith((self.end, *self.more_ends))
        self._state = _ANSWER if closed else _OPENING
        self._thinks_first = opened or (self.implied and not context.guided)
        self.reasoning = self._thinks_first and not closed
        self._emitted = False  # reasoning was returned
        self._lead = TextBuffer()  # white space at the beginning, until it is known to what it belongs
        self._buffer = ""
        self._gate = WhitespaceBuffer()

    def feed(self, text: str) -> list[Event]:
        if self._state == _ANSWER:
            return [Content(text)]
        if len(text) > PIECE_CHARS:
            return [event for piece in pieces_of(text) for event in self.feed(piece)]
        self._buffer += text
        events: list[Event] = []
        if self._state == _OPENING:
            self._open()
        if self._state == _THINKING:
            self._think(events)
        if self._state == _AFTER:
            self._skip_spaces()
        if self._state == _ANSWER and self._buffer:
            events.append(Content(self._buffer))
            self._buffer = ""
        return events

    def plain(self, text: str) -> PlainKind:
        if self._state == _ANSWER:
            return Content
        reasons = self._state == _THINKING and self._emitted and not self._buffer
        return Reasoning if reasons and self._tags.absent(text) and self._gate.passes(text) else None

    def _open(self) -> None:
        begun = self._buffer.lstrip()
        self._lead.add(self._buffer[: len(self._buffer) - len(begun)])
        self._buffer = begun
        if start := next(filter(begun.startswith, self._starts), ""):
            self._state, self._buffer = _THINKING, begun[len(start) :]
            self._lead.clear()
            self.reasoning = True
        elif any(start.startswith(begun) for start in self._starts):  # only white space and an incomplete tag
            return
        else:
            thinks = self._thinks_first and not (self.context.guided and begun[0] in "{[")
            self._state, self.reasoning = (_THINKING if thinks else _ANSWER), thinks
            self._buffer = self._lead.take() + begun

    def _think(self, events: list[Event]) -> None:
        before, marker, self._buffer = self._tags.split(self._buffer)
        if before and (certain := self._gate.text(before)):
            self._reason(certain, events)
        if marker:
            self._gate.marker()
            self._state, self.reasoning = _AFTER, False

    def _reason(self, text: str, events: list[Event]) -> None:
        text = text if self._emitted else text.lstrip()
        if text:
            self._emitted = True
            events.append(Reasoning(text))

    def _skip_spaces(self) -> None:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = _ANSWER

    def finish(self) -> list[Event]:
        events: list[Event] = []
        text, self._buffer = self._lead.take() + self._buffer, ""
        if self.reasoning:
            self._reason(self._gate.flush() + text, events)
        elif text:
            events.append(Content(text))
        return events

    @property
    def held(self) -> str:
        return self._gate.held + self._lead.text + self._buffer

    @property
    def held_size(self) -> int:
        return len(self._gate.held) + self._lead.size + len(self._buffer)


class ImpliedThinkParser(ThinkParser):
    """For models that always reason, even without the opening tag in prompt and output, such as DeepSeek R1."""

    implied = True


class MistralThinkParser(ThinkParser):
    """Parses Magistral's `[THINK]…[/THINK]`."""

    start = "[THINK]"
    end = "[/THINK]"


class AppendedThinkParser(Parser):
    """Returns all output as content, with the opening tag that the prompt contains put before it."""

    tag = "<think>"
    markers = frozenset(("<think>", "</think>"))

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._due = context.prompt_tail.rstrip().endswith(self.tag)

    def feed(self, text: str) -> list[Event]:
        opening, self._due = self.tag + "\n" if self._due else "", False
        return [Content(opening + text)]

    def plain(self, text: str) -> PlainKind:
        return None if self._due else Content

    def finish(self) -> list[Event]:
        return []
