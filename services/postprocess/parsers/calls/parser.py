"""Base classes for parsers of tool calls.

A format defines the markers that begin and end a call, and a `Body` that parses the text between them. The text of a
call is held until its name is known; then its arguments are streamed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from services.postprocess.parsers.base import Parser, ParserContext
from services.postprocess.parsers.calls.call_names import NOT_CHOSEN, Calls, Named
from services.postprocess.parsers.events import CallArguments, Content, Degraded, Event, PlainKind
from services.postprocess.parsers.scanning.json_scan import Malformed
from services.postprocess.parsers.scanning.markers import (
    MAX_SPACES,
    PIECE_CHARS,
    Markers,
    TextBuffer,
    WhitespaceBuffer,
    pieces_of,
)

MAX_HEAD = 65_536
"""Maximum characters held until a call's name is known; a longer head is text."""

MALFORMED = "tool_call_malformed"
REPAIRED = "tool_call_repaired"
INCOMPLETE = "tool_call_incomplete"


class Body(ABC):
    """Parses the text between the markers of one or several calls.

    Attributes:
        done: the body is complete.
        calling: the arguments of a call are incomplete.
        repaired: the text violated the format, but the call is complete.
        last: no text follows; set by the parser.
    """

    done: bool = False
    calling: bool = False
    repaired: bool = False
    last: bool = False

    @abstractmethod
    def push(self, text: str, at: int) -> tuple[int, Named | str | None]:
        """Parses from `at` up to the next result.

        Returns:
            Where it stopped, and a call, the next piece of its arguments, or None at the end of `text` or of the body.

        Raises:
            Malformed: the text violates the format; the body cannot be used any further.
        """

    def close(self) -> str | None:
        """Returns the end of the current call's arguments if only the markup after them is missing, else None."""
        return None


class CallParser(Parser):
    """Parses content that contains calls.

    White space around a call belongs to the call. A call whose head is malformed, or that the request does not allow,
    becomes content. A call that is malformed after its arguments began keeps its text up to the end marker, because
    its start was returned already. Both are marked as degraded.

    A wrapper is omitted if a call follows its opening marker, and otherwise content, marked as degraded. End markers
    and closing wrappers are omitted after a call; unexpected ones there are marked. Elsewhere they are content.

    Attributes:
        starts: markers that begin a body.
        ends: markers that end a body; may be empty.
        swallowed: markers around one or several calls, the opening and the closing one.
        dropped: markers around content, which are always omitted.
        marked: calls always begin with a marker.
    """

    starts: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()
    swallowed: ClassVar[tuple[str, ...]] = ()
    dropped: ClassVar[tuple[str, ...]] = ()
    marked: ClassVar[bool] = True
    id_prefix: ClassVar[str] = "call_"
    id_length: ClassVar[int] = 24

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.starts and not cls.dropped:
            return  # another base class
        cls._outside = Markers(*cls.starts, *cls.ends, *cls.swallowed, *cls.dropped)
        cls._begins = Markers(*cls.starts) if cls.starts else None
        cls._markup = frozenset((*cls.starts, *cls.ends, *cls.swallowed, *cls.dropped, *cls.markers))
        cls._opening, cls._closing = frozenset(cls.swallowed[::2]), frozenset(cls.swallowed[1::2])

    _outside: ClassVar[Markers]
    _begins: ClassVar[Markers | None]
    _markup: ClassVar[frozenset[str]]
    _opening: ClassVar[frozenset[str]]
    _closing: ClassVar[frozenset[str]]

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._calls = Calls(context, self.id_prefix, self.id_length, self._markup)
        self._gate = WhitespaceBuffer()
        self._buffer = ""
        self._opened = ""  # opening wrappers, with white space, until it is known whether a call follows
        self._repeated = False  # one of these is there twice
        self._raw = TextBuffer()  # parsed text of the current call that was not returned yet
        self._head_size = 0  # characters of `_raw` that begin the current call and cannot begin another one
        self._begun_by = ""  # the marker of the current or last body
        self._body: Body | None = None
        self._index = -1  # of the call whose arguments are streamed; -1: none
        self._unclosed = False  # a call is complete but its end marker has not arrived
        self._wrapped: frozenset[str] = frozenset()  # closing wrappers that may follow a complete call
        self._after_call = False  # no content since the last call
        self._in_broken = False
        self._marked = True  # the current call began with a marker
        self._last = False  # no text follows

    def scout(self) -> CallParser:
        """Returns a parser of the same text that accepts only tools of the request."""
        parser = type(self)(self.context)
        parser._calls.known = self.context.names
        return parser

    body: Callable[..., Body]
    """Returns the body parser for the text after a start marker."""

    def feed(self, text: str) -> list[Event]:
        if len(text) > PIECE_CHARS:
            return [event for piece in pieces_of(text) for event in self.feed(piece)]
        self._buffer = self._buffer + text if self._buffer else text
        events: list[Event] = []
        while self._buffer and self._step(events):
            pass
        return events

    def plain(self, text: str) -> PlainKind:
        if self._body is not None or self._in_broken or self._unclosed or self._after_call or self._buffer:
            return None
        if self._opened:
            return None
        return Content if self._outside.absent(text) and self._gate.passes(text) else None

    def _step(self, events: list[Event]) -> bool:
        """Parses the next part of the buffer; returns False if more text is needed."""
        if self._body is not None:
            return self._read(self._body, events)
        if self._in_broken:
            return self._read_broken(events)
        return self._scan(events)

    def _scan(self, events: list[Event]) -> bool:
        before, marker, self._buffer = self._outside.split(self._buffer)
        self._add_text(before, events)
        if not marker:
            return False
        if marker in self.starts:
            self._begin(marker, events)
        elif marker in self._opening:
            self._open(marker, events)
        elif marker in self.dropped:
            self._gate.marker()
        elif self._unclosed or self._after_call:
            self._end_markup(marker, events)
        else:
            self._add_text(marker, events)
        return True

    def _begin(self, marker: str, events: list[Event]) -> None:
        self._begun_by = marker
        self._body, self._raw, self._marked = self.body(), TextBuffer(self._opened + marker), True
        self._body.last = self._last
        self._body.repaired = self._repeated
        self._head_size = self._raw.size
        self._opened, self._repeated = "", False

    def _open(self, marker: str, events: list[Event]) -> None:
        if len(self._opened) > MAX_SPACES:
            self._restore_opened(events)
        self._repeated = self._repeated or marker in self._opened
        self._opened += marker

    def _restore_opened(self, events: list[Event], reason: str = MALFORMED) -> None:
        """Turns opening wrappers without a call into content."""
        if self._opened:
            events.append(Degraded(reason))
            text, self._opened, self._repeated = self._opened, "", False
            self._add_content(text, events)

    def _end_markup(self, marker: str, events: list[Event]) -> None:
        """Omits the end marker of a call, or a closing wrapper."""
        closes = marker in self._closing
        if not (marker in self._wrapped if closes else self._unclosed):
            events.append(Degraded(REPAIRED))
        self._wrapped -= {marker}
        self._unclosed = False
        self._gate.marker()

    def _add_text(self, text: str, events: list[Event]) -> None:
        """Adds text outside calls."""
        if self._opened and text:
            if text.isspace() and len(self._opened) + len(text) <= 2 * MAX_SPACES:
                self._opened += text
                return
            self._restore_opened(events)
        self._add_content(text, events)

    def _add_content(self, text: str, events: list[Event]) -> None:
        if text and (certain := self._gate.text(text)):
            if self._unclosed and self._after_call and self._marked:
                events.append(Degraded(MALFORMED))
            self._after_call = False
            events.append(Content(certain))

    def _read(self, body: Body, events: list[Event]) -> bool:
        room = len(self._buffer) if body.calling else MAX_HEAD - self._raw.size
        try:
            at, found = body.push(self._buffer[:room], 0)
            if not found and not body.done and at == room < len(self._buffer):
                raise Malformed(at)
        except Malformed as error:
            self._advance(error.at)
            self._fail(body, events)
            return True
        self._advance(at)
        if isinstance(found, Named):
            self._start_call(found, events)
        elif found:
            events.append(CallArguments(self._index, found))
            self._raw.clear()
        if body.done and self._body is body:
            self._complete(events)
        return self._body is not body or bool(found)

    def _advance(self, at: int) -> None:
        self._raw.add(self._buffer[:at])
        self._buffer = self._buffer[at:]

    def _start_call(self, call: Named, events: list[Event]) -> None:
        if not self._calls.is_name(call.name):
            self._give_up(events, MALFORMED)
            return
        if not self._calls.allows(call.name):
            self._give_up(events, NOT_CHOSEN)
            return
        self._gate.marker()
        self._raw.clear()
        self._head_size = 0
        self._after_call = True
        start = self._calls.start(call)
        self._index = start.call
        events.append(start)
        if call.arguments:
            events.append(CallArguments(start.call, call.arguments))

    def _complete(self, events: list[Event]) -> None:
        if self._body is not None and self._body.repaired:
            events.append(Degraded(REPAIRED))
        self._gate.marker()
        self._body, self._index = None, -1
        self._raw.clear()
        self._unclosed, self._wrapped = bool(self.ends), self._closing

    def _fail(self, body: Body, events: list[Event]) -> None:
        """Handles a malformed body."""
        if not body.calling:
            called = self._index >= 0
            self._give_up(events, MALFORMED)
            self._unclosed = called and bool(self.ends)
            return
        events.append(Degraded(MALFORMED))
        if self._raw:
            events.append(CallArguments(self._index, self._raw.take()))
        self._body, self._in_broken = None, True

    def _give_up(self, events: list[Event], reason: str) -> None:
        """Turns the held text of the current call into content, up to a marker in it that begins another call."""
        if self._marked or self._index >= 0 or reason == NOT_CHOSEN:
            events.append(Degraded(reason))
        raw, self._body, self._index = self._raw.take(), None, -1
        self._unclosed = False
        stop = len(raw)
        if reason != NOT_CHOSEN and self._begins is not None:
            stop, _ = self._begins.find(raw, self._head_size)
        self._buffer = raw[stop:] + self._buffer
        self._add_content(raw[:stop], events)

    def _read_broken(self, events: list[Event]) -> bool:
        before, marker, self._buffer = self._outside.split(self._buffer)
        if before:
            events.append(CallArguments(self._index, before))
        if not marker:
            return False
        self._in_broken, self._index = False, -1
        self._unclosed, self._wrapped = False, self._closing - {marker}
        if marker in self.dropped:
            self._gate.marker()
        if marker in self.starts:
            self._begin(marker, events)
        elif marker in self._opening:
            self._open(marker, events)
        return True

    def finish(self) -> list[Event]:
        events: list[Event] = []
        self._last = True
        self._drain(events)
        while self._body is not None:
            self._finish_body(self._body, events)
            self._drain(events)
        if self._in_broken:
            if self._buffer:
                events.append(CallArguments(self._index, self._buffer))
        else:
            self._add_text(self._unread(), events)
        self._buffer = ""
        self._restore_opened(events, INCOMPLETE)
        space = self._gate.flush()
        if space and not self._after_call:
            events.append(Content(space))
        return events + self._calls.end()

    def _drain(self, events: list[Event]) -> None:
        """Parses all of the buffer as the end of the text."""
        if self._body is not None:
            self._body.last = True
        more = True
        while more and self._buffer:
            more = self._step(events)

    def _unread(self) -> str:
        """Returns the text outside calls that was not read."""
        return self._buffer

    def _finish_body(self, body: Body, events: list[Event]) -> None:
        closing = body.close() if self._index >= 0 else None
        rest, self._buffer = self._buffer, ""
        if closing is not None:
            events += [Degraded(INCOMPLETE), *([CallArguments(self._index, closing)] if closing else [])]
            self._complete(events)
            return
        self._raw.add(rest)
        if body.calling:
            events.append(Degraded(INCOMPLETE))
            if self._raw:
                events.append(CallArguments(self._index, self._raw.take()))
            self._body = None
        elif self._index >= 0 and not self._raw.text.strip(" \t\r\n]})`"):
            self._complete(events)  # all calls are complete, only closing brackets are missing
            events.append(Degraded(INCOMPLETE))
        else:
            self._give_up(events, INCOMPLETE)

    @property
    def held(self) -> str:
        return self._gate.held + self._opened + self._raw.text + self._buffer

    @property
    def held_size(self) -> int:
        return len(self._gate.held) + len(self._opened) + self._raw.size + len(self._buffer)
