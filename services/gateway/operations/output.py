"""Responses of every API, streamed or collected, and the usage of the generations behind them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.base.errors import SluiceError
from services.gateway.core.generation import Generation
from services.gateway.core.request import Finish
from services.gateway.operations.operation import EVENT_STREAM, EventListener, Marked, Streamed, Unattached
from services.gateway.operations.waiting import Gone, run_unless_gone

COMMENT = b": keep-alive\n\n"
"""A server-sent event that clients ignore."""
TEXT, REASONING = -1, -2
"""Kinds of buffered output; values from 0 on are the numbers of calls."""

FieldRenamer = Callable[[SluiceError], SluiceError]


@dataclass(frozen=True, slots=True)
class Counts:
    """Token counts of a response; `cached` is included in `prompt` and `reasoning` in `generated`."""

    prompt: int = 0
    generated: int = 0
    cached: int = 0
    reasoning: int = 0


class GenerationUsage:
    """Sums the token counts of generations.

    Args:
        prompt_only: do not count generated tokens.
    """

    def __init__(self, prompt_only: bool = False) -> None:
        self.generations: list[Generation] = []
        self._prompt_only = prompt_only

    def counts(self) -> Counts:
        """Returns the counts so far, over all generations."""
        prompt = completion = cached = reasoning = 0
        for generation in self.generations:
            prompt += generation.prompt_tokens
            completion += generation.completion_tokens
            cached += generation.cached_tokens
            reasoning += generation.reasoning_tokens
        return Counts(prompt, 0 if self._prompt_only else completion, cached, reasoning)

    def prompt_tokens(self, choice: int) -> int:
        """Returns the prompt tokens of the generation that a choice belongs to."""
        for generation in self.generations:
            if choice < generation.choices:
                return generation.prompt_tokens
            choice -= generation.choices
        return 0

    def cancel(self) -> None:
        """Cancels all generations."""
        for generation in self.generations:
            generation.cancel()


class StreamedChoice(ABC):
    """One choice of a streamed response: a sink that buffers output until the next write."""

    __slots__ = ("_buffer", "_head", "_kind", "_opened", "_ready", "_response", "_result")

    def __init__(self, response: StreamedResponse) -> None:
        self._response = response
        self._buffer = ""
        self._kind = TEXT  # of the buffered output
        self._head = ("", "")  # id and name of the buffered call, if its first piece is buffered
        self._ready = b""  # encoded events, which precede the buffered output
        self._opened = False
        self._result: Finish | None = None

    def text(self, piece: str) -> None:
        """See Sink."""
        if self._kind != TEXT:
            self._switch(TEXT)
        self._buffer += piece
        response = self._response
        response.unsent += len(piece)
        response.stream.notify(first=not self._opened)

    def reasoning(self, piece: str) -> None:
        """See Sink."""
        if self._response.drop_reasoning:
            return
        if self._kind != REASONING:
            self._switch(REASONING)
        self._add(piece)

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """See Sink."""
        if self._kind != call or name:
            self._switch(call)
        if name:
            self._head = (call_id, name)
        self._add(arguments)

    def finish(self, finish: Finish) -> None:
        """See Sink."""
        self._result = finish
        self._response.choice_ended()

    def fail(self, error: SluiceError) -> None:
        """See Sink; fails the whole response."""
        self._response.fail(error)

    def take(self) -> bytes:
        """Returns the events of all buffered output."""
        events, self._ready = self._ready, b""
        if self._buffer or self._head[1]:
            events += self._encode_buffer()
        if self._result is not None:
            result, self._result = self._result, None
            events += self._open() + self._encode_finish(result)
        return events

    def _add(self, piece: str) -> None:
        self._buffer += piece
        self._response.unsent += len(piece)
        self._response.stream.notify(first=not self._opened)

    def _switch(self, kind: int) -> None:
        """Encodes the buffered output, because output of another kind follows."""
        self._ready += self._encode_buffer()
        self._kind = kind

    def _encode_buffer(self) -> bytes:
        if not self._buffer and not self._head[1]:
            return b""
        opening = b"" if self._opened else self._open()
        piece, self._buffer = self._buffer, ""
        if self._kind == TEXT:
            return opening + self._encode_text(piece)
        if self._kind == REASONING:
            return opening + self._encode_reasoning(piece)
        head, self._head = self._head, ("", "")
        return opening + self._encode_call(self._kind, *head, piece)

    def _open(self) -> bytes:
        """Returns the events before the first output, once."""
        if self._opened:
            return b""
        self._opened = True
        return self._encode_opening()

    @abstractmethod
    def _encode_opening(self) -> bytes:
        """Returns the events before the first output."""

    @abstractmethod
    def _encode_text(self, piece: str) -> bytes: ...

    @abstractmethod
    def _encode_reasoning(self, piece: str) -> bytes: ...

    @abstractmethod
    def _encode_call(self, call: int, call_id: str, name: str, arguments: str) -> bytes:
        """Returns the events of a piece of a call; only the first piece has an id and a name."""

    @abstractmethod
    def _encode_finish(self, finish: Finish) -> bytes:
        """Returns the events that end the choice."""


class StreamedResponse(ABC):
    """The event source of a streamed response; see EventSource.

    Args:
        rename_fields: returns an error with its fields named as in the client's API.
        drop_reasoning: the response does not contain reasoning.
        prompt_only: the usage does not count generated tokens.

    Attributes:
        sinks: the choices; set by subclasses.
    """

    sinks: Sequence[StreamedChoice]

    def __init__(self, rename_fields: FieldRenamer, drop_reasoning: bool = False, prompt_only: bool = False) -> None:
        self.stream: EventListener = Unattached()
        self.usage = GenerationUsage(prompt_only)
        self.unsent = 0
        self.over = False
        self.drop_reasoning = drop_reasoning
        self.rename_fields = rename_fields
        self._ended_choices = 0
        self._error: SluiceError | None = None
        self._started = False

    async def started(self, start: Awaitable[Iterable[Marked]], media_type: str = EVENT_STREAM) -> Streamed:
        """Returns the stream once its generations have started.

        Args:
            start: starts the generations, and returns them and other fallbacks to report.
        """
        try:
            marked = await start
        except BaseException:
            self.cancel()
            raise
        return Streamed(self, marked, media_type)

    def attach(self, listener: EventListener) -> None:
        """See EventSource."""
        before, self.stream = self.stream, listener
        if isinstance(before, Unattached) and before.notified:
            listener.notify(first=True)

    @property
    def failure(self) -> SluiceError | None:
        """The error, if the response failed before anything was written."""
        return None if self._started else self._error

    def choice_ended(self) -> None:
        """Counts an ended choice; the last one ends the response."""
        self._ended_choices += 1
        self.over = self.over or self._ended_choices == len(self.sinks)
        self.stream.notify()

    def fail(self, error: SluiceError) -> None:
        """Ends the response with an error."""
        if not self.over:
            self._error = self.rename_fields(error)
            self.over = True
            self.usage.cancel()
            self.stream.notify()

    def cancel(self) -> None:
        """Cancels the generations, and breaks the reference cycle of response, choices and stream."""
        self.usage.cancel()
        self.sinks = ()

    def take(self) -> bytes:
        """Returns the events of all buffered output, and the end of the stream once the response has ended."""
        self._started = True
        self.unsent = 0
        sinks = self.sinks
        events = sinks[0].take() if len(sinks) == 1 else b"".join([sink.take() for sink in sinks])
        if not self.over:
            return events
        return events + (self._encode_end() if self._error is None else self._encode_failure(self._error))

    def silence(self) -> bytes:
        """See EventSource; a comment, as clients of chunks take each for a piece of a choice."""
        return COMMENT

    def _encode_end(self) -> bytes:
        """Returns the events after those of all choices."""
        return b""

    @abstractmethod
    def _encode_failure(self, error: SluiceError) -> bytes:
        """Returns the events that report an error in the middle of the stream."""


class CollectedResponse(ABC):
    """The end of a collected response, and the usage of its generations.

    Args:
        rename_fields: returns an error with its fields named as in the client's API.
        prompt_only: the usage does not count generated tokens.
    """

    def __init__(self, rename_fields: FieldRenamer, prompt_only: bool = False) -> None:
        self.usage = GenerationUsage(prompt_only)
        self._done = asyncio.Event()
        self.rename_fields = rename_fields
        self._error: SluiceError | None = None

    @property
    @abstractmethod
    def sinks(self) -> Sequence[Any]:
        """The sink of each choice."""

    def fail(self, error: SluiceError) -> None:
        """Fails the response."""
        if self._error is None:
            self._error = self.rename_fields(error)
            self.usage.cancel()
            self._done.set()

    def cancel(self) -> None:
        """Cancels the generations."""
        self.usage.cancel()

    async def ended(self, gone: Gone) -> bool:
        """Waits for the end of the response; returns False, after cancelling it, if the caller is gone."""
        return await run_unless_gone(gone, self._done, self.usage.cancel)

    def check(self) -> None:
        """Raises SluiceError if the response failed."""
        error, self._error = self._error, None  # break the reference cycle: the traceback references this frame
        if error is not None:
            try:
                raise error
            finally:
                del error


class ReadyEvents:
    """Events that are all there from the beginning; see EventSource."""

    failure = None
    over = True

    def __init__(self, events: bytes) -> None:
        self._events = events

    @property
    def unsent(self) -> int:
        """See EventSource."""
        return len(self._events)

    def attach(self, listener: EventListener) -> None:
        """See EventSource."""
        listener.notify(first=True)

    def take(self) -> bytes:
        """See EventSource."""
        events, self._events = self._events, b""
        return events

    def silence(self) -> bytes:
        """See EventSource."""
        return COMMENT

    def cancel(self) -> None:
        """See EventSource."""
        self._events = b""
