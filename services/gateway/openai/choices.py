"""The two ways a client hears its choices: as events while they come, or all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import orjson

from services.common.errors import SluiceError
from services.gateway.generation import Finish
from services.gateway.http.event_stream import EventStream
from services.gateway.openai.answers import DONE, Format, error_event, usage
from services.gateway.pipeline import Generation


class Usage:
    """What the generations behind one answer used."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []

    def counts(self) -> dict[str, object]:
        """The usage object over all of them."""
        return usage(
            sum(generation.prompt_tokens for generation in self.generations),
            sum(generation.completion_tokens for generation in self.generations),
            sum(generation.cached_tokens for generation in self.generations),
        )

    def cancel(self) -> None:
        """Stops them all."""
        for generation in self.generations:
            generation.cancel()


class StreamedChoice:
    """One choice of a streamed answer: text waits here until the next write."""

    __slots__ = ("_after", "_before", "_events", "_opened", "ended", "index", "waiting")

    def __init__(self, index: int, events: StreamedChoices, before: bytes, after: bytes) -> None:
        self.index = index
        self.waiting = ""
        self.ended: Finish | None = None
        self._events = events
        self._before = before
        self._after = after
        self._opened = False

    def text(self, piece: str) -> None:
        """The next text."""
        self.waiting += piece
        events = self._events
        events.unsent += len(piece)
        events.stream.notify(first=not self._opened)

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
        if not self._opened and (self.waiting or self.ended):
            self._opened = True
            events = form.opening(self.index)
        if self.waiting:
            text, self.waiting = self.waiting, ""
            events += self._before + orjson.dumps(text) + self._after
        if self.ended is not None:
            events += form.closing(self.index, self.ended)
            self.ended = None
        return events


class StreamedChoices:
    """The event source of a streamed answer."""

    def __init__(self, form: Format, number: int, include_usage: bool) -> None:
        self.stream: EventStream
        self.usage = Usage()
        self.sinks = [StreamedChoice(index, self, *form.text_affixes(index)) for index in range(number)]
        self.unsent = 0
        self.over = False
        self._form = form
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
            self._error = error
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
        events = b"".join([sink.take(self._form) for sink in self.sinks])
        if not self.over:
            return events
        if self._error is not None:
            return events + error_event(self._error) + DONE
        if self._include_usage:
            events += self._form.usage_event(self.usage.counts())
        return events + DONE


class CollectedChoice:
    """One choice of an answer that is not streamed."""

    def __init__(self, choices: CollectedChoices) -> None:
        self.pieces: list[str] = []
        self.ended: Finish | None = None
        self._choices = choices

    def text(self, piece: str) -> None:
        """The next text."""
        self.pieces.append(piece)

    def finish(self, finish: Finish) -> None:
        """No more text."""
        self.ended = finish
        self._choices.one_ended()

    def fail(self, error: SluiceError) -> None:
        """This choice failed, and the whole answer with it."""
        self._choices.fail(error)


class CollectedChoices:
    """Gathers an answer that is not streamed."""

    def __init__(self, number: int) -> None:
        self.usage = Usage()
        self.sinks = [CollectedChoice(self) for _ in range(number)]
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
            self.error = error
            self.usage.cancel()
            self.done.set()

    def cancel(self) -> None:
        """The client is gone, or everything is said."""
        self.usage.cancel()
        self.sinks.clear()

    def texts(self) -> Sequence[tuple[str, Finish]]:
        """Text and end of every choice; SluiceError when one failed."""
        if self.error is not None:
            raise self.error
        return [("".join(sink.pieces), sink.ended) for sink in self.sinks if sink.ended is not None]
