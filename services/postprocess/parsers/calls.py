"""Tool calls inside text: what all formats have in common.

A format says how a call begins and ends (markers) and reads what is between with a `Body`. Until a call's name is
known its text is held, afterwards its arguments go out as they come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from services.postprocess.parsers.base import Parser, ParserContext
from services.postprocess.parsers.events import CallArguments, CallStart, Content, Degraded, Event
from services.postprocess.parsers.json_scan import Malformed
from services.postprocess.parsers.markers import PIECE_CHARS, Markers, TextBuffer, WhitespaceBuffer, pieces_of

HEAD_AT_MOST = 65_536
"""Characters that may be held until a call's name is known; longer ones are text."""

MALFORMED = "tool_call_malformed"
INCOMPLETE = "tool_call_incomplete"
NOT_CHOSEN = "tool_choice_not_honoured"


class Named(NamedTuple):
    """A call whose arguments begin; `id` is empty where the model gave none, `arguments` are those already read."""

    name: str
    id: str = ""
    arguments: str = ""


class Body(ABC):
    """Reads what stands between the markers of a call, or of several calls.

    Attributes:
        done: nothing more belongs to it.
        calling: the arguments of a call are under way.
    """

    done: bool = False
    calling: bool = False

    @abstractmethod
    def push(self, text: str, at: int) -> tuple[int, Named | str | None]:
        """Reads on from `at` up to the next news.

        Returns:
            Where it stopped, and the news: a call, the next piece of its arguments, or None when there is none before
            the end of `text` or of the body.

        Raises:
            Malformed: what the format does not allow; the body is of no use after that.
        """


class Calls:
    """Counts the calls of one answer and knows which are allowed.

    Args:
        context: of the stream.
        prefix, length: of the ids.
    """

    def __init__(self, context: ParserContext, prefix: str = "call_", length: int = 24) -> None:
        self._context = context
        self._prefix = prefix
        self._length = length
        self._ids: set[str] = set()
        self.count = 0

    def allows(self, name: str) -> bool:
        """Whether the request's tool_choice and parallel_tool_calls leave room for this call."""
        return not (self._context.only and name != self._context.only) and not (self._context.single and self.count)

    def start(self, call: Named) -> CallStart:
        """The next call; an id that the model used before is replaced."""
        own = self._prefix + self._context.token(self.count, self._length)
        chosen = call.id if call.id and call.id not in self._ids else own
        self._ids.add(chosen)
        self.count += 1
        return CallStart(self.count - 1, chosen, call.name)

    def end(self) -> list[Event]:
        """At the end of the text: says so when a call was demanded and none came."""
        wanted = self._context.required or self._context.only
        return [Degraded(NOT_CHOSEN)] if wanted and not self.count else []


class CallParser(Parser):
    """Content with calls in it.

    White space beside a call belongs to the call. A call whose head cannot be read, or that the request does not
    allow, is content as the model wrote it. One that goes wrong after its arguments began keeps its text up to the
    end marker, since what was told cannot be taken back. Both are marked `degraded`.

    Attributes:
        starts: markers that begin a body.
        ends: markers that end it; may be empty.
        swallowed: markers without meaning of their own, left out.
    """

    starts: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()
    swallowed: ClassVar[tuple[str, ...]] = ()
    id_prefix: ClassVar[str] = "call_"
    id_length: ClassVar[int] = 24

    def __init_subclass__(cls) -> None:
        if not cls.starts:
            return  # another base class
        cls._outside = Markers(*cls.starts, *cls.ends, *cls.swallowed)
        cls._edges = Markers(*cls.starts, *cls.ends)

    _outside: ClassVar[Markers]
    _edges: ClassVar[Markers]

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._calls = Calls(context, self.id_prefix, self.id_length)
        self._gate = WhitespaceBuffer()
        self._buffer = ""
        self._raw = TextBuffer()  # of the call under way, read and not told
        self._body: Body | None = None
        self._index = -1  # of the call whose arguments are told now; -1: none
        self._unclosed = False  # a call is complete, its end marker did not come yet
        self._after_call = False  # nothing was said since
        self._in_broken = False
        self._marked = True  # a marker said that a call begins

    @abstractmethod
    def body(self) -> Body:
        """What reads after a start marker."""

    def feed(self, text: str) -> list[Event]:
        """See Parser."""
        if len(text) > PIECE_CHARS:
            return [event for piece in pieces_of(text) for event in self.feed(piece)]
        self._buffer = self._buffer + text if self._buffer else text
        events: list[Event] = []
        while self._buffer and self._step(events):
            pass
        return events

    def _step(self, events: list[Event]) -> bool:
        """Reads what the buffer allows in the present state; False when it needs more text."""
        if self._body is not None:
            return self._read(self._body, events)
        if self._in_broken:
            return self._read_broken(events)
        return self._look(events)

    def _look(self, events: list[Event]) -> bool:
        before, marker, self._buffer = self._outside.split(self._buffer)
        self._say(before, events)
        if not marker:
            return False
        if marker in self.starts:
            self._begin(marker)
        elif marker in self.swallowed or self._unclosed:
            self._gate.marker()
            self._unclosed = False
        else:
            self._say(marker, events)
        return True

    def _begin(self, marker: str) -> None:
        self._body, self._raw, self._marked = self.body(), TextBuffer(marker), True

    def _say(self, text: str, events: list[Event]) -> None:
        if text and (certain := self._gate.text(text)):
            if self._unclosed and self._after_call and self._marked:
                events.append(Degraded(MALFORMED))
            self._after_call = False
            events.append(Content(certain))

    def _read(self, body: Body, events: list[Event]) -> bool:
        room = len(self._buffer) if body.calling else HEAD_AT_MOST - self._raw.size
        part = self._buffer[:room]
        try:
            at, news = body.push(part, 0)
            if not news and not body.done and at == room < len(self._buffer):
                raise Malformed(at)
        except Malformed as error:
            self._advance(error.at)
            self._fail(body, events)
            return True
        self._advance(at)
        if isinstance(news, Named):
            self._announce(news, events)
        elif news:
            events.append(CallArguments(self._index, news))
            self._raw.clear()
        if body.done and self._body is body:
            self._complete()
        return self._body is not body or bool(news)

    def _advance(self, at: int) -> None:
        self._raw.add(self._buffer[:at])
        self._buffer = self._buffer[at:]

    def _announce(self, call: Named, events: list[Event]) -> None:
        if not self._calls.allows(call.name):
            self._give_up(events, NOT_CHOSEN)
            return
        self._gate.marker()
        self._raw.clear()
        self._after_call = True
        start = self._calls.start(call)
        self._index = start.call
        events.append(start)
        if call.arguments:
            events.append(CallArguments(start.call, call.arguments))

    def _complete(self) -> None:
        self._gate.marker()
        self._body, self._index = None, -1
        self._raw.clear()
        self._unclosed = bool(self.ends)

    def _fail(self, body: Body, events: list[Event]) -> None:
        """The body is malformed."""
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
        """What was held is content after all."""
        raw, self._body, self._index = self._raw.take(), None, -1
        if self._marked or reason == NOT_CHOSEN:
            events.append(Degraded(reason))
        self._unclosed = False
        self._say(raw, events)

    def _read_broken(self, events: list[Event]) -> bool:
        before, marker, self._buffer = self._edges.split(self._buffer)
        if before:
            events.append(CallArguments(self._index, before))
        if not marker:
            return False
        self._in_broken, self._index = False, -1
        self._unclosed = False
        if marker in self.starts:
            self._begin(marker)
        return True

    def finish(self) -> list[Event]:
        """See Parser."""
        events: list[Event] = []
        if self._body is not None:
            self._finish_body(self._body, events)
        elif self._in_broken:
            if self._buffer:
                events.append(CallArguments(self._index, self._buffer))
        else:
            self._say(self._buffer, events)
        self._buffer = ""
        space = self._gate.flush()
        if space and not self._after_call:
            events.append(Content(space))
        return events + self._calls.end()

    def _finish_body(self, body: Body, events: list[Event]) -> None:
        self._raw.add(self._buffer)
        if body.calling:
            events.append(Degraded(INCOMPLETE))
            if self._raw:
                events.append(CallArguments(self._index, self._raw.text))
        elif self._index >= 0 and not self._raw.text.strip(" \t\r\n]})`"):
            self._complete()  # all calls are there, only brackets are missing
            events.append(Degraded(INCOMPLETE))
        else:
            self._give_up(events, INCOMPLETE)

    @property
    def held(self) -> str:
        """See Parser."""
        return self._gate.held + self._raw.text + self._buffer

    @property
    def held_size(self) -> int:
        """See Parser."""
        return len(self._gate.held) + self._raw.size + len(self._buffer)
