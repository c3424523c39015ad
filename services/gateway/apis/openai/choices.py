"""Sinks that turn the choices of a response into a stream of events or collect them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import orjson

from services.common.errors import SluiceError
from services.gateway.apis.openai.completion_objects import (
    DONE,
    PLAIN,
    Choice,
    Detail,
    Format,
    ToolCall,
    error_event,
    usage,
)
from services.gateway.apis.openai.error_params import with_client_name
from services.gateway.core.request import Finish
from services.gateway.http.sse import EventStream
from services.gateway.pipeline.pipeline import Generation


class Usage:
    """The token usage of the generations behind one response."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        self.prompt_only = False  # do not count generated tokens

    def counts(self) -> dict[str, object]:
        """Returns the usage object, summed over all generations."""
        generated = 0 if self.prompt_only else sum(generation.completion_tokens for generation in self.generations)
        return usage(
            sum(generation.prompt_tokens for generation in self.generations),
            generated,
            sum(generation.cached_tokens for generation in self.generations),
            sum(generation.reasoning_tokens for generation in self.generations),
        )

    def prompt_tokens(self, choice: int) -> int:
        """Returns the prompt tokens of the generation that a choice belongs to."""
        for generation in self.generations:
            if choice < len(generation.streams):
                return generation.prompt_tokens
            choice -= len(generation.streams)
        return 0

    def cancel(self) -> None:
        """Cancels all generations."""
        for generation in self.generations:
            generation.cancel()


_TEXT, _REASONING = -1, -2
"""Kinds of buffered output in a streamed choice; values from 0 on are call numbers."""


class StreamedChoice:
    """One choice of a streamed response; buffers output until the next write."""

    __slots__ = ("_after", "_before", "_buffer", "_events", "_head", "_kind", "_opened", "_ready", "_result", "index")

    def __init__(self, index: int, events: StreamedChoices) -> None:
        self.index = index
        self._buffer = ""
        self._kind = _TEXT  # of the buffered output
        self._result: Finish | None = None
        self._head = ("", "")  # id and name of the buffered call, if its first piece is buffered
        self._ready = b""  # encoded events, which precede the buffered output
        self._events = events
        self._before, self._after = events.form.text_affixes(index)
        self._opened = False

    def text(self, piece: str) -> None:
        """See Sink."""
        if self._kind != _TEXT:
            self._switch(_TEXT)
        self._buffer += piece
        events = self._events
        events.unsent += len(piece)
        events.stream.notify(first=not self._opened)

    def reasoning(self, piece: str) -> None:
        """See Sink."""
        if self._events.drop_reasoning:
            return
        if self._kind != _REASONING:
            self._switch(_REASONING)
        self._add(piece)

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """See Sink."""
        if self._kind != call or name:
            self._switch(call)
        if name:
            self._head = (call_id, name)
        self._add(arguments)

    def _add(self, piece: str) -> None:
        self._buffer += piece
        self._events.unsent += len(piece)
        self._events.stream.notify(first=not self._opened)

    def _switch(self, kind: int) -> None:
        """Encodes the buffered output, because output of another kind follows."""
        self._ready += self._encode_buffer()
        self._kind = kind

    def _encode_buffer(self) -> bytes:
        if not self._buffer and not self._head[1]:
            return b""
        text, self._buffer = self._buffer, ""
        if self._kind == _TEXT:
            return self._text_event(text)
        form = self._events.form
        if self._kind == _REASONING:
            return form.reasoning(self.index, text, self._detail())
        head, self._head = self._head, ("", "")
        return form.tool_call(self.index, self._kind, *head, text, self._detail())

    def _text_event(self, text: str) -> bytes:
        return self._before + orjson.dumps(text) + self._after

    def _opening_detail(self) -> Detail:
        """Returns the extra fields of the first chunk."""
        return PLAIN

    def _detail(self) -> Detail:
        """Returns the extra fields of the next chunk."""
        return PLAIN

    def finish(self, finish: Finish) -> None:
        """See Sink."""
        self._result = finish
        self._events.choice_ended()

    def fail(self, error: SluiceError) -> None:
        """See Sink; fails the whole response."""
        self._events.fail(error)

    def take(self, form: Format) -> bytes:
        """Returns the events of all buffered output."""
        events = b""
        if not self._opened and (self._buffer or self._ready or self._head[1] or self._result):
            self._opened = True
            events = form.role_chunk(self.index, self._opening_detail())
        if self._ready:
            events += self._ready
            self._ready = b""
        if self._buffer or self._head[1]:
            events += self._encode_buffer()
        if self._result is not None:
            events += form.finish_chunk(self.index, self._result, self._detail())
            self._result = None
        return events


class StreamedChoices:
    """The event source of a streamed response.

    Args:
        make: creates choices with details beyond their text; None for plain choices.
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
        self.field_names: Mapping[str, str] = {}  # the client's names of fields, for errors
        self._include_usage = include_usage
        self._open = number
        self._error: SluiceError | None = None
        self._started = False

    @property
    def failure(self) -> SluiceError | None:
        """The error, if the response failed before anything was written."""
        return None if self._started else self._error

    def choice_ended(self) -> None:
        """Counts an ended choice; the last one ends the response."""
        self._open -= 1
        self.over = self.over or self._open == 0
        self.stream.notify()

    def fail(self, error: SluiceError) -> None:
        """Ends the response with an error."""
        if not self.over:
            self._error = with_client_name(error, self.field_names)
            self.over = True
            self.usage.cancel()
            self.stream.notify()

    def cancel(self) -> None:
        """Cancels the generations."""
        self.usage.cancel()
        # Break the reference cycle of sinks, source and response, so that no garbage collection is needed.
        self.sinks.clear()

    def take(self) -> bytes:
        """Returns the events of all buffered output, and the end of the stream once the response has ended."""
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
    """One choice of a collected response."""

    def __init__(self, choices: CollectedChoices) -> None:
        self.pieces: list[str] = []
        self.reasoning_pieces: list[str] = []
        self.calls: dict[int, tuple[str, str, list[str]]] = {}
        self.result: Finish | None = None
        self._choices = choices

    def text(self, piece: str) -> None:
        """See Sink."""
        self.pieces.append(piece)

    def reasoning(self, piece: str) -> None:
        """See Sink."""
        if not self._choices.drop_reasoning:
            self.reasoning_pieces.append(piece)

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """See Sink."""
        self.calls.setdefault(call, (call_id, name, []))[2].append(arguments)

    def choice(self, finish: Finish) -> Choice:
        """Returns the completed choice."""
        calls = [ToolCall(call_id, name, "".join(pieces)) for call_id, name, pieces in self.calls.values()]
        return Choice("".join(self.pieces), finish, "".join(self.reasoning_pieces), calls)

    def finish(self, finish: Finish) -> None:
        """See Sink."""
        self.result = finish
        self._choices.choice_ended()

    def fail(self, error: SluiceError) -> None:
        """See Sink; fails the whole response."""
        self._choices.fail(error)


class CollectedChoices:
    """Collects the choices of a response.

    Args:
        make: creates choices with details beyond their text; None for plain choices.
    """

    def __init__(
        self,
        number: int,
        drop_reasoning: bool = False,
        make: Callable[[CollectedChoices], CollectedChoice] | None = None,
    ) -> None:
        self.usage = Usage()
        self.drop_reasoning = drop_reasoning
        self.field_names: Mapping[str, str] = {}  # the client's names of fields, for errors
        self.sinks = [(make or CollectedChoice)(self) for _ in range(number)]
        self.done = asyncio.Event()
        self.error: SluiceError | None = None
        self._open = number

    def choice_ended(self) -> None:
        """Counts an ended choice."""
        self._open -= 1
        if self._open == 0:
            self.done.set()

    def fail(self, error: SluiceError) -> None:
        """Fails the response."""
        if self.error is None:
            self.error = with_client_name(error, self.field_names)
            self.usage.cancel()
            self.done.set()

    def cancel(self) -> None:
        """Cancels the generations."""
        self.usage.cancel()
        self.sinks.clear()

    def results(self) -> Sequence[Choice]:
        """Returns the completed choices; raises SluiceError if one failed."""
        error, self.error = self.error, None  # break the reference cycle: the traceback references this frame
        if error is not None:
            try:
                raise error
            finally:
                del error
        return [sink.choice(sink.result) for sink in self.sinks if sink.result is not None]
