"""The two ways a client hears its choices: as events while they come, or all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import orjson

from services.common.errors import SluiceError
from services.gateway.apis.openai.completion_objects import (
    DONE,
    PLAIN,
    Answer,
    Detail,
    Format,
    ToolCall,
    error_event,
    usage,
)
from services.gateway.apis.openai.error_params import renamed
from services.gateway.core.request import Finish
from services.gateway.http.sse import EventStream
from services.gateway.pipeline.pipeline import Generation


class Usage:
    """What the generations behind one answer used."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        self.only_prompt = False  # what was generated is not the client's

    def counts(self) -> dict[str, object]:
        """The usage object over all of them."""
        generated = 0 if self.only_prompt else sum(generation.completion_tokens for generation in self.generations)
        return usage(
            sum(generation.prompt_tokens for generation in self.generations),
            generated,
            sum(generation.cached_tokens for generation in self.generations),
            sum(generation.reasoning_tokens for generation in self.generations),
        )

    def prompt_tokens(self, choice: int) -> int:
        """Of the prompt that a choice answers."""
        for generation in self.generations:
            if choice < len(generation.streams):
                return generation.prompt_tokens
            choice -= len(generation.streams)
        return 0

    def cancel(self) -> None:
        """Stops them all."""
        for generation in self.generations:
            generation.cancel()


_TEXT, _REASONING = -1, -2
"""What waits in a streamed choice; from 0 on it is the number of a call."""


class StreamedChoice:
    """One choice of a streamed answer: text waits here until the next write."""

    __slots__ = ("_after", "_before", "_call", "_events", "_head", "_opened", "_ready", "ended", "index", "waiting")

    def __init__(self, index: int, events: StreamedChoices) -> None:
        self.index = index
        self.waiting = ""  # of the kind that `_call` says
        self.ended: Finish | None = None
        self._call = _TEXT
        self._head = ("", "")  # id and name of the call that waits, if its first piece does
        self._ready = b""  # events of what came before
        self._events = events
        self._before, self._after = events.form.text_affixes(index)
        self._opened = False

    def text(self, piece: str) -> None:
        """The next text."""
        if self._call != _TEXT:
            self._switch(_TEXT)
        self.waiting += piece
        events = self._events
        events.unsent += len(piece)
        events.stream.notify(first=not self._opened)

    def reasoning(self, piece: str) -> None:
        """The next text of the model's thinking."""
        if self._events.drop_reasoning:
            return
        if self._call != _REASONING:
            self._switch(_REASONING)
        self._add(piece)

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """The next piece of a call."""
        if self._call != call or name:
            self._switch(call)
        if name:
            self._head = (call_id, name)
        self._add(arguments)

    def _add(self, piece: str) -> None:
        self.waiting += piece
        self._events.unsent += len(piece)
        self._events.stream.notify(first=not self._opened)

    def _switch(self, call: int) -> None:
        """Something else comes: what waits becomes events."""
        self._ready += self._written()
        self._call = call

    def _written(self) -> bytes:
        if not self.waiting and not self._head[1]:
            return b""
        text, self.waiting = self.waiting, ""
        if self._call == _TEXT:
            return self._text_event(text)
        form = self._events.form
        if self._call == _REASONING:
            return form.reasoning(self.index, text, self._detail())
        head, self._head = self._head, ("", "")
        return form.tool_call(self.index, self._call, *head, text, self._detail())

    def _text_event(self, text: str) -> bytes:
        return self._before + orjson.dumps(text) + self._after

    def _opening_detail(self) -> Detail:
        """What the first chunk says besides the role."""
        return PLAIN

    def _detail(self) -> Detail:
        """What the next chunk says besides its delta."""
        return PLAIN

    def finish(self, finish: Finish) -> None:
        """No more text."""
        self.ended = finish
        self._events.one_ended()

    def fail(self, error: SluiceError) -> None:
        """This choice failed, and the whole answer with it."""
        self._events.fail(error)

    def take(self, form: Format) -> bytes:
        """Events of everything that waits."""
        events = b""
        if not self._opened and (self.waiting or self._ready or self._head[1] or self.ended):
            self._opened = True
            events = form.opening(self.index, self._opening_detail())
        if self._ready:
            events += self._ready
            self._ready = b""
        if self.waiting or self._head[1]:
            events += self._written()
        if self.ended is not None:
            events += form.closing(self.index, self.ended, self._detail())
            self.ended = None
        return events


class StreamedChoices:
    """The event source of a streamed answer.

    Args:
        make: makes a choice that shows more than its text; None for plain ones.
    """

    def __init__(
        self,
        form: Format,
        number: int,
        include_usage: bool,
        drop_reasoning: bool = False,
        make: Callable[[int, StreamedChoices], StreamedChoice] | None = None,
    ) -> None:
        self.stream: EventStream
        self.usage = Usage()
        self.form = form
        self.sinks = [(make or StreamedChoice)(index, self) for index in range(number)]
        self.unsent = 0
        self.over = False
        self.drop_reasoning = drop_reasoning
        self.names: Mapping[str, str] = {}  # of fields, as the client knows them
        self._include_usage = include_usage
        self._open = number
        self._error: SluiceError | None = None
        self._started = False

    @property
    def failure(self) -> SluiceError | None:
        """The error, when it came before anything was written."""
        return None if self._started else self._error

    def one_ended(self) -> None:
        """A choice has ended; the last one ends the answer."""
        self._open -= 1
        self.over = self.over or self._open == 0
        self.stream.notify()

    def fail(self, error: SluiceError) -> None:
        """The answer cannot go on."""
        if not self.over:
            self._error = renamed(error, self.names)
            self.over = True
            self.usage.cancel()
            self.stream.notify()

    def cancel(self) -> None:
        """The client is gone, or everything is said."""
        self.usage.cancel()
        # Sinks, source and response know each other: parted here, they need no garbage collector.
        self.sinks.clear()

    def take(self) -> bytes:
        """Events of everything that waits, with the end of the stream when it is due."""
        self._started = True
        self.unsent = 0
        events = b"".join([sink.take(self.form) for sink in self.sinks])
        if not self.over:
            return events
        if self._error is not None:
            return events + error_event(self._error) + DONE
        if self._include_usage:
            events += self.form.usage_event(self.usage.counts())
        return events + DONE


class CollectedChoice:
    """One choice of an answer that is not streamed."""

    def __init__(self, choices: CollectedChoices) -> None:
        self.pieces: list[str] = []
        self.thoughts: list[str] = []
        self.calls: dict[int, tuple[str, str, list[str]]] = {}
        self.ended: Finish | None = None
        self._choices = choices

    def text(self, piece: str) -> None:
        """The next text."""
        self.pieces.append(piece)

    def reasoning(self, piece: str) -> None:
        """The next text of the model's thinking."""
        if not self._choices.drop_reasoning:
            self.thoughts.append(piece)

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """The next piece of a call."""
        self.calls.setdefault(call, (call_id, name, []))[2].append(arguments)

    def answer(self, finish: Finish) -> Answer:
        """What was said, all of it."""
        calls = [ToolCall(call_id, name, "".join(pieces)) for call_id, name, pieces in self.calls.values()]
        return Answer("".join(self.pieces), finish, "".join(self.thoughts), calls)

    def finish(self, finish: Finish) -> None:
        """No more text."""
        self.ended = finish
        self._choices.one_ended()

    def fail(self, error: SluiceError) -> None:
        """This choice failed, and the whole answer with it."""
        self._choices.fail(error)


class CollectedChoices:
    """Gathers an answer that is not streamed; `make` makes choices that show more than their text."""

    def __init__(
        self,
        number: int,
        drop_reasoning: bool = False,
        make: Callable[[CollectedChoices], CollectedChoice] | None = None,
    ) -> None:
        self.usage = Usage()
        self.drop_reasoning = drop_reasoning
        self.names: Mapping[str, str] = {}  # of fields, as the client knows them
        self.sinks = [(make or CollectedChoice)(self) for _ in range(number)]
        self.done = asyncio.Event()
        self.error: SluiceError | None = None
        self._open = number

    def one_ended(self) -> None:
        """A choice has ended."""
        self._open -= 1
        if self._open == 0:
            self.done.set()

    def fail(self, error: SluiceError) -> None:
        """The answer cannot be given."""
        if self.error is None:
            self.error = renamed(error, self.names)
            self.usage.cancel()
            self.done.set()

    def cancel(self) -> None:
        """The client is gone, or everything is said."""
        self.usage.cancel()
        self.sinks.clear()

    def answers(self) -> Sequence[Answer]:
        """Every choice; SluiceError when one failed."""
        error, self.error = self.error, None  # its traceback comes back to us: held here, it would hold itself
        if error is not None:
            try:
                raise error
            finally:
                del error
        return [sink.answer(sink.ended) for sink in self.sinks if sink.ended is not None]
