"""Sinks that turn one choice into a stream of events or into a collected transcript."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from services.common.errors import SluiceError
from services.common.observability import telemetry
from services.gateway.apis.common.transcript import Counts, Kind, PendingTokens, Transcript
from services.gateway.apis.openai.logprobs import ShownToken
from services.gateway.core.request import Finish, PositionLogprobs
from services.gateway.http.sse import EventStream
from services.gateway.pipeline.pipeline import Generation

_TEXT, _REASONING = -1, -2
"""Kinds of buffered output in a streamed turn; values from 0 on are call numbers."""


class EventEncoder(Protocol):
    """Encodes a turn as the events of one API; every method returns complete events."""

    def opening(self, counts: Counts) -> bytes:
        """Returns the events before the first block."""

    def text(self, piece: str, tokens: Sequence[ShownToken]) -> bytes: ...

    def reasoning(self, piece: str) -> bytes: ...

    def call(self, call: int, call_id: str, name: str, arguments: str) -> bytes:
        """Returns the events of a piece of a call; only the first piece has an id and a name."""

    def closing(self, finish: Finish, counts: Counts) -> bytes:
        """Returns the events that end the last block and the turn."""

    def failure(self, error: SluiceError, counts: Counts) -> bytes:
        """Returns the events of a stream that failed."""


class Turn:
    """Base of the sinks of one choice."""

    def __init__(self, rename_fields: Callable[[SluiceError], SluiceError]) -> None:
        self.generation: Generation | None = None
        self._rename_fields = rename_fields

    @property
    def counts(self) -> Counts:
        """Token counts so far."""
        generation = self.generation
        if generation is None:
            return Counts()
        return Counts(
            generation.prompt_tokens,
            generation.completion_tokens,
            generation.cached_tokens,
            generation.reasoning_tokens,
        )

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """See TokenSink."""

    def shown_prompt(self, tokens: Sequence[ShownToken]) -> None:
        """See TokenSink; prompt log-probabilities are never requested."""

    def logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """See Sink; handled by a LogprobsAssembler in front of this sink if requested."""

    def prompt_logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """See Sink; prompt log-probabilities are never requested."""

    def tokens(self, pieces: Sequence[bytes], offsets: Sequence[int]) -> None:
        """See Sink; handled by a LogprobsAssembler in front of this sink if requested."""

    def cancel(self) -> None:
        """Cancels the generation, if one was started."""
        if self.generation is not None:
            self.generation.cancel()


class StreamedTurn(Turn):
    """Buffers a turn as server-sent events until the next write."""

    def __init__(self, encoder: EventEncoder, rename_fields: Callable[[SluiceError], SluiceError]) -> None:
        super().__init__(rename_fields)
        self.stream: EventStream
        self.unsent = 0
        self.over = False
        self._encoder = encoder
        self._pending_tokens = PendingTokens()
        self._buffer = ""
        self._kind = _TEXT
        self._head = ("", "")  # id and name of the buffered call, if its first piece is buffered
        self._ready = b""  # encoded events, which precede the buffered piece
        self._finish: Finish | None = None
        self._error: SluiceError | None = None
        self._opened = False

    @property
    def failure(self) -> SluiceError | None:
        """The error, if the turn failed before anything was written."""
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
        self._pending_tokens.add(tokens)

    def _add(self, kind: int, piece: str) -> None:
        if self._kind != kind:
            self._switch(kind)
        self._buffer += piece
        self.unsent += len(piece)
        self.stream.notify(first=not self._opened)

    def _switch(self, kind: int) -> None:
        """Encodes the buffered piece, because output of another kind follows."""
        self._ready += self._encode_buffer()
        self._kind = kind

    def _encode_buffer(self) -> bytes:
        if not self._buffer and not self._head[1]:
            return b""
        opening = self._opening()
        piece, self._buffer = self._buffer, ""
        if self._kind == _TEXT:
            return opening + self._encoder.text(piece, self._pending_tokens.take())
        self._pending_tokens.skip(piece)
        if self._kind == _REASONING:
            return opening + self._encoder.reasoning(piece)
        head, self._head = self._head, ("", "")
        return opening + self._encoder.call(self._kind, *head, piece)

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
            self._error = self._rename_fields(error)
            self.over = True
            super().cancel()
            self.stream.notify()

    def take(self) -> bytes:
        """See EventSource."""
        self.unsent = 0
        buffered = self._encode_buffer()
        events, self._ready = self._ready + buffered + self._opening(), b""
        if self._error is not None:
            telemetry.failed(self._error)
            return events + self._encoder.failure(self._error, self.counts)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            return events + self._encoder.closing(finish, self.counts)
        return events


class CollectedTurn(Turn):
    """Collects a turn that is returned as one response."""

    def __init__(self, rename_fields: Callable[[SluiceError], SluiceError]) -> None:
        super().__init__(rename_fields)
        self.transcript = Transcript()
        self.done = asyncio.Event()
        self._pending_tokens = PendingTokens()
        self._finish: Finish | None = None
        self._error: SluiceError | None = None

    def text(self, piece: str) -> None:
        """See Sink."""
        self.transcript.add(Kind.TEXT, piece, self._pending_tokens.take())

    def reasoning(self, piece: str) -> None:
        """See Sink."""
        self._pending_tokens.skip(piece)
        self.transcript.add(Kind.REASONING, piece)

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """See Sink."""
        self._pending_tokens.skip(arguments)
        self.transcript.add_call(call, call_id, name, arguments)

    def shown(self, tokens: Sequence[ShownToken]) -> None:
        """See TokenSink."""
        self._pending_tokens.add(tokens)

    def finish(self, finish: Finish) -> None:
        """See Sink."""
        self._finish = finish
        self.done.set()

    def fail(self, error: SluiceError) -> None:
        """See Sink."""
        if self._error is None:
            self._error = self._rename_fields(error)
            self.cancel()
            self.done.set()

    def result(self) -> Finish:
        """Returns how the turn finished; raises SluiceError if it failed."""
        error, self._error = self._error, None  # break the reference cycle: the traceback references this frame
        if error is not None:
            try:
                raise error
            finally:
                del error
        assert self._finish is not None
        return self._finish
