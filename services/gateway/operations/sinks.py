"""Sinks that turn one choice into a stream of events or into a collected transcript."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.common.base.errors import SluiceError
from services.common.observability import telemetry
from services.gateway.core.request import Finish
from services.gateway.operations.logprobs import TokenText
from services.gateway.operations.output import (
    CollectedResponse,
    Counts,
    FieldRenamer,
    StreamedChoice,
    StreamedResponse,
)
from services.gateway.operations.transcript import BlockKind, PendingTokens, Transcript


class EventEncoder(Protocol):
    """Encodes a turn as the events of one API; every method returns complete events."""

    def opening(self, counts: Counts) -> bytes:
        """Returns the events before the first block."""

    def text(self, piece: str, tokens: Sequence[TokenText]) -> bytes: ...

    def reasoning(self, piece: str) -> bytes: ...

    def call(self, call: int, call_id: str, name: str, arguments: str) -> bytes:
        """Returns the events of a piece of a call; only the first piece has an id and a name."""

    def closing(self, finish: Finish, counts: Counts) -> bytes:
        """Returns the events that end the last block and the turn."""

    def failure(self, error: SluiceError, counts: Counts) -> bytes:
        """Returns the events of a stream that failed."""

    def silence(self) -> bytes:
        """Returns an event that tells the client of an open turn nothing but that it is still alive."""


class _NoPromptTokens:
    """The methods of TokenSink without effect here."""

    __slots__ = ()

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """See TokenSink."""

    def shown_prompt(self, tokens: Sequence[TokenText]) -> None:
        """See TokenSink; prompt log-probabilities are never requested."""


class StreamedTurn(_NoPromptTokens, StreamedChoice):
    """The choice of a streamed turn."""

    __slots__ = ("_encoder", "_pending_tokens")

    def __init__(self, encoder: EventEncoder, response: StreamedBlocks) -> None:
        super().__init__(response)
        self._encoder = encoder
        self._pending_tokens = PendingTokens()

    def shown(self, tokens: Sequence[TokenText]) -> None:
        """See TokenSink."""
        self._pending_tokens.add(tokens)

    def take(self) -> bytes:
        """Returns the events of all buffered output, after those that open the turn, even if there is none yet."""
        return self._open() + super().take()

    def _encode_opening(self) -> bytes:
        return self._encoder.opening(self._response.usage.counts())

    def _encode_text(self, piece: str) -> bytes:
        return self._encoder.text(piece, self._pending_tokens.take())

    def _encode_reasoning(self, piece: str) -> bytes:
        self._pending_tokens.skip(piece)
        return self._encoder.reasoning(piece)

    def _encode_call(self, call: int, call_id: str, name: str, arguments: str) -> bytes:
        self._pending_tokens.skip(arguments)
        return self._encoder.call(call, call_id, name, arguments)

    def _encode_finish(self, finish: Finish) -> bytes:
        return self._encoder.closing(finish, self._response.usage.counts())


class StreamedBlocks(StreamedResponse):
    """The event source of a streamed turn, the only one of `sinks`."""

    sinks: Sequence[StreamedTurn]

    def __init__(self, encoder: EventEncoder, rename_fields: FieldRenamer) -> None:
        super().__init__(rename_fields)
        self.sinks = (StreamedTurn(encoder, self),)
        self._encoder = encoder

    def silence(self) -> bytes:
        """See EventSource; an event, as clients may count events only."""
        return self._encoder.silence()

    def _encode_failure(self, error: SluiceError) -> bytes:
        telemetry.failed(error)
        return self._encoder.failure(error, self.usage.counts())


class CollectedTurn(_NoPromptTokens, CollectedResponse):
    """Collects a turn that is returned as one response."""

    def __init__(self, rename_fields: FieldRenamer) -> None:
        super().__init__(rename_fields)
        self.transcript = Transcript()
        self._pending_tokens = PendingTokens()
        self._finish: Finish | None = None

    @property
    def sinks(self) -> Sequence[CollectedTurn]:
        """This turn, which is its own only choice."""
        return (self,)

    def text(self, piece: str) -> None:
        """See Sink."""
        self.transcript.add(BlockKind.TEXT, piece, self._pending_tokens.take())

    def reasoning(self, piece: str) -> None:
        """See Sink."""
        self._pending_tokens.skip(piece)
        self.transcript.add(BlockKind.REASONING, piece)

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """See Sink."""
        self._pending_tokens.skip(arguments)
        self.transcript.add_call(call, call_id, name, arguments)

    def shown(self, tokens: Sequence[TokenText]) -> None:
        """See TokenSink."""
        self._pending_tokens.add(tokens)

    def finish(self, finish: Finish) -> None:
        """See Sink."""
        self._finish = finish
        self._done.set()

    def result(self) -> Finish:
        """Returns how the turn finished; raises SluiceError if it failed."""
        self.check()
        assert self._finish is not None
        return self._finish
