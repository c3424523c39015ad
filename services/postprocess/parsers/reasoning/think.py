"""Parsers of reasoning between tags such as `<think>…</think>` before the content."""

from __future__ import annotations

from typing import ClassVar

from services.postprocess.parsers.base import Parser, ParserContext
from services.postprocess.parsers.events import Content, Event, PlainKind, Reasoning
from services.postprocess.parsers.scanning.markers import PIECE_CHARS, Markers, TextBuffer, WhitespaceBuffer, pieces_of

MAX_UNDECIDED = 65_536
"""Maximum characters held to find out whether constrained output is a thought; more of them are one."""

_OPENING, _UNDECIDED, _THINKING, _AFTER, _ANSWER = range(5)


class ThinkParser(Parser):
    """Parses one block of reasoning at the beginning of the output; white space around the tags belongs to them.

    The block starts if the prompt ends with the opening tag, or the output begins with it. If the prompt ends with the
    closing tag, reasoning is disabled and all output is content. A thought that the prompt leaves open continues. A
    closing tag at the beginning of the output ends a thought that is empty.

    Output constrained by a grammar is content, even if the prompt ends with the opening tag: some engines constrain all
    of it, others what follows the thought. A brace or bracket at the beginning, or no closing tag at the end, tells.

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
        continued = context.thinking and not opened
        self._state = _THINKING if continued else _OPENING
        self._opening = () if closed else self._starts  # tags that open the block
        self._thinks_first = not closed and (opened or self.implied)
        self.reasoning = continued or self._thinks_first
        self._emitted = continued  # reasoning was returned
        self._undecided = TextBuffer()
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
        if self._state == _UNDECIDED:
            self._decide()
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
        ends = () if self._thinks_first else (self.end, *self.more_ends)
        if start := next(filter(begun.startswith, self._opening), ""):
            self._state, self._buffer = _THINKING, begun[len(start) :]
            self._lead.clear()
            self.reasoning = True
        elif end := next(filter(begun.startswith, ends), ""):
            self._state, self._buffer = _AFTER, begun[len(end) :]
            self._lead.clear()
        elif any(tag.startswith(begun) for tag in (*self._opening, *ends)) or not begun:
            return  # only white space and an incomplete tag
        else:
            constrained = self.context.guided and begun[0] in "{["
            self.reasoning = self._thinks_first and not constrained
            self._state = _ANSWER if not self.reasoning else _UNDECIDED if self.context.guided else _THINKING
            self._buffer = self._lead.take() + begun

    def _decide(self) -> None:
        """Holds constrained output until a closing tag, or its length, shows that it is a thought."""
        before, marker, rest = self._tags.split(self._buffer)
        self._undecided.add(before)
        self._buffer = rest
        if marker or self._undecided.size > MAX_UNDECIDED:
            self._state, self._buffer = _THINKING, self._undecided.take() + marker + rest

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
        text, self._buffer = self._lead.take() + self._undecided.take() + self._buffer, ""
        if self.context.guided and self._state in (_OPENING, _UNDECIDED):
            self.reasoning, self.retracted = False, True
        if self.reasoning:
            self._reason(self._gate.flush() + text, events)
        elif text:
            events.append(Content(text))
        return events

    @property
    def held(self) -> str:
        return self._gate.held + self._lead.text + self._undecided.text + self._buffer

    @property
    def held_size(self) -> int:
        return len(self._gate.held) + self._lead.size + self._undecided.size + len(self._buffer)
