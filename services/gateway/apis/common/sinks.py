"""The two ways a client hears a turn: as events while it comes, or all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from services.common.errors import SluiceError
from services.common.observability import telemetry
from services.gateway.apis.common.transcript import Counts, Kind, TokensAside, Transcript
from services.gateway.apis.openai.logprobs import ShownToken
from services.gateway.core.request import Finish, PositionLogprobs
from services.gateway.http.sse import EventStream
from services.gateway.pipeline.pipeline import Generation

_TEXT, _REASONING = -1, -2
"""What waits in a streamed turn; from 0 on it is the number of a call."""


class EventEncoder(Protocol):
    """Writes a turn as the events of one API; every method answers complete events."""

    def opening(self, counts: Counts) -> bytes:
        """What comes before the first block."""

    def text(self, piece: str, tokens: Sequence[ShownToken]) -> bytes: ...

    def reasoning(self, piece: str) -> bytes: ...

    def call(self, call: int, call_id: str, name: str, arguments: str) -> bytes:
        """A piece of a call; the first one has id and name."""

    def closing(self, finish: Finish, counts: Counts) -> bytes:
        """The end of the last block and of the turn."""

    def failure(self, error: SluiceError, counts: Counts) -> bytes:
        """What a stream says when it cannot go on."""


class Turn:
    """What streamed and collected turns have in common; a sink that hears one choice."""

    def __init__(self, rename_fields: Callable[[SluiceError], SluiceError]) -> None:
        self.generation: Generation | None = None
        self._respell = rename_fields

    @property
    def counts(self) -> Counts:
        """Tokens so far."""
        one = self.generation
        if one is None:
            return Counts()
        return Counts(one.prompt_tokens, one.completion_tokens, one.cached_tokens, one.reasoning_tokens)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """See TokenSink."""

    def shown_prompt(self, tokens: Sequence[ShownToken]) -> None:
        """See TokenSink; nobody asks."""

    def logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """See Sink; where they are asked for, an annotator hears them."""

    def prompt_logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """See Sink; nobody asks."""

    def tokens(self, pieces: Sequence[bytes], offsets: Sequence[int]) -> None:
        """See Sink; where they are asked for, an annotator hears them."""

    def cancel(self) -> None:
        """The client is gone, or everything is said."""
        if self.generation is not None:
            self.generation.cancel()


class StreamedTurn(Turn):
    """A turn as server-sent events: what is said waits here until the next write."""

    def __init__(self, encoder: EventEncoder, rename_fields: Callable[[SluiceError], SluiceError]) -> None:
        super().__init__(rename_fields)
        self.stream: EventStream
        self.unsent = 0
        self.over = False
        self._encoder = encoder
        self._aside = TokensAside()
        self._waiting = ""
        self._what = _TEXT
        self._head = ("", "")  # id and name of the call that waits, if its first piece does
        self._ready = b""  # events of what came before
        self._finish: Finish | None = None
        self._error: SluiceError | None = None
        self._opened = False

    @property
    def failure(self) -> SluiceError | None:
        """The error, when it came before anything was written."""
        return None if self._opened else self._error

    def text(self, piece: str) -> None:
        """See Sink."""
        self._add(_TEXT, piece)

    def reasoning(self, piece: str) -> None:
        """See Sink."""
        self._add(_REASONING, piece)

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """See Sink."""
        if name:
            self._switch(call)
            self._head = (call_id, name)
        self._add(call, arguments)

    def shown(self, tokens: Sequence[ShownToken]) -> None:
        """See TokenSink."""
        self._aside.add(tokens)

    def _add(self, what: int, piece: str) -> None:
        if self._what != what:
            self._switch(what)
        self._waiting += piece
        self.unsent += len(piece)
        self.stream.notify(first=not self._opened)

    def _switch(self, what: int) -> None:
        """Something else comes: what waits becomes events."""
        self._ready += self._told()
        self._what = what

    def _told(self) -> bytes:
        if not self._waiting and not self._head[1]:
            return b""
        opening = self._opening()
        piece, self._waiting = self._waiting, ""
        if self._what == _TEXT:
            return opening + self._encoder.text(piece, self._aside.take())
        self._aside.skip(piece)
        if self._what == _REASONING:
            return opening + self._encoder.reasoning(piece)
        head, self._head = self._head, ("", "")
        return opening + self._encoder.call(self._what, *head, piece)

    def _opening(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        return self._encoder.opening(self.counts)

    def finish(self, finish: Finish) -> None:
        """See Sink."""
        self._finish = finish
        self.over = True
        self.stream.notify()

    def fail(self, error: SluiceError) -> None:
        """See Sink."""
        if not self.over:
            self._error = self._respell(error)
            self.over = True
            super().cancel()
            self.stream.notify()

    def take(self) -> bytes:
        """See EventSource."""
        self.unsent = 0
        told = self._told()
        events, self._ready = self._ready + told + self._opening(), b""
        if self._error is not None:
            telemetry.failed(self._error)
            return events + self._encoder.failure(self._error, self.counts)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            return events + self._encoder.closing(finish, self.counts)
        return events


class CollectedTurn(Turn):
    """A turn that is answered at once."""

    def __init__(self, rename_fields: Callable[[SluiceError], SluiceError]) -> None:
        super().__init__(rename_fields)
        self.transcript = Transcript()
        self.done = asyncio.Event()
        self._aside = TokensAside()
        self._finish: Finish | None = None
        self._error: SluiceError | None = None

    def text(self, piece: str) -> None:
        """See Sink."""
        self.transcript.add(Kind.TEXT, piece, self._aside.take())

    def reasoning(self, piece: str) -> None:
        """See Sink."""
        self._aside.skip(piece)
        self.transcript.add(Kind.REASONING, piece)

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """See Sink."""
        self._aside.skip(arguments)
        self.transcript.add_call(call, call_id, name, arguments)

    def shown(self, tokens: Sequence[ShownToken]) -> None:
        """See TokenSink."""
        self._aside.add(tokens)

    def finish(self, finish: Finish) -> None:
        """See Sink."""
        self._finish = finish
        self.done.set()

    def fail(self, error: SluiceError) -> None:
        """See Sink."""
        if self._error is None:
            self._error = self._respell(error)
            self.cancel()
            self.done.set()

    def ended(self) -> Finish:
        """How it ended; SluiceError when it failed."""
        error, self._error = self._error, None  # its traceback comes back to us: held here, it would hold itself
        if error is not None:
            try:
                raise error
            finally:
                del error
        assert self._finish is not None
        return self._finish
