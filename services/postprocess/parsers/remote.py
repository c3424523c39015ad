"""Streams whose parsers run in another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.postprocess.detokenize.stream import Finish, FinishReason, Stream
from services.postprocess.detokenize.token_texts import TokenRecorder
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.engine_names import bare
from services.postprocess.parsers.events import CallStart, Content, Degraded, Event

REPLAYED_PIECES = 262_144
"""Pieces kept to replay a stream after its process died; a longer stream then becomes plain text."""

NOT_REPLAYED = "parser_lost"


@dataclass(frozen=True, slots=True)
class ParserPair:
    """Parsers of one model: location of its files, and names without the engine prefix, empty for none."""

    source: str
    tool: str
    reasoning: str


def pair_of(source: str, names: ParserNames) -> ParserPair:
    """Returns the pair that a stream needs."""
    return ParserPair(source, bare(names.tool), bare(names.reasoning))


class StreamHost(Protocol):
    """Manages the process of a stream's parser; implemented by `ParserHost`."""

    def changed(self, stream: RemoteStream) -> None:
        """Schedules a stream that has text to parse."""

    def forget(self, stream: RemoteStream) -> None:
        """Closes a stream."""


class RemoteStream:
    """Like a ParsedStream, except that its events arrive later: `changed` is called when there are any.

    Attributes:
        number: id of the stream in messages.
        pieces: the text of each token.
        parsed: number of pieces that the process has parsed.
        sent: number of pieces that were sent to the process.
        tokens: the token of each piece, -1 for none; None if the parser does not need them.
        opened: the stream is open in the process.
        forgiven: the process died once while it parsed this stream.
        ending: the finish of the text stream, None before; the last piece is then the text of the end.
    """

    def __init__(
        self,
        number: int,
        stream: Stream,
        names: ParserNames,
        context: ParserContext,
        host: StreamHost,
        tokens: bool = False,
    ) -> None:
        self.number = number
        self.names = names
        self.context = context
        self.pieces: list[str] = []
        self.tokens: list[int] | None = [] if tokens else None
        self.parsed = 0
        self.sent = 0
        self.opened = False
        self.forgiven = False
        self.end_sent = False
        self.ending: Finish | None = None
        self.events: list[Event] = []
        self.finish: Finish | None = None
        self.changed: Callable[[], None] = _ignore
        self._stream = stream
        self._host = host
        self._held = ""
        self._plain = False
        self._dropped = False  # parsed pieces are not kept for a replay any more
        self._calls = False
        self._reasoning_tokens = 0

    @property
    def recorder(self) -> TokenRecorder | None:
        return self._stream.recorder

    @property
    def tokens_seen(self) -> int:
        """Number of tokens received."""
        return self._stream.tokens_seen

    @property
    def behind(self) -> bool:
        """Whether the process has not parsed all pieces yet."""
        return self.parsed < len(self.pieces)

    def take_events(self) -> list[Event]:
        """Returns the events since the last call."""
        events, self.events = self.events, []
        return events

    def feed(self, tokens: Sequence[int]) -> None:
        """Adds tokens."""
        stream = self._stream
        if self.ending is not None:
            return
        ids = self.tokens
        for token in tokens:
            text = stream.feed_one(token)
            if stream.finish is not None:
                self._set_ending(text, token, stream.finish)
                return
            self.pieces.append(text)
            if ids is not None:
                ids.append(token)
        self._submit()

    def tokens_of(self, start: int, end: int | None = None) -> list[int] | None:
        """Returns the tokens of some pieces; None if the parser does not need them."""
        return None if self.tokens is None else self.tokens[start:end]

    def end(self, reason: FinishReason, stop_token_id: int | None = None) -> None:
        """Ends the stream as the engine did; see Stream.end."""
        text = self._stream.end(reason, stop_token_id)
        if self.ending is None and self._stream.finish is not None:
            self._set_ending(text, -1, self._stream.finish)

    def _set_ending(self, text: str, token: int, finish: Finish) -> None:
        self.pieces.append(text)
        if self.tokens is not None:
            self.tokens.append(token)
        self.ending = finish
        self._submit()

    def _submit(self) -> None:
        if self._plain:
            self._emit_plain()
        else:
            self._host.changed(self)

    def add_result(self, pieces: int, events: list[Event], held: str, reasoning_tokens: int, failed: bool) -> None:
        """Adds the result of parsing the next `pieces` pieces."""
        self.parsed += pieces
        self._held = held
        self._reasoning_tokens += reasoning_tokens
        self._calls = self._calls or any(isinstance(event, CallStart) for event in events)
        self.events += events
        if failed:
            self._plain = True
            self._emit_plain()
        elif self.end_sent and self.parsed == len(self.pieces):
            self._finish()
        if len(self.pieces) > REPLAYED_PIECES:
            self._dropped = True
            del self.pieces[: self.parsed]
            if self.tokens is not None:
                del self.tokens[: self.parsed]
            self.sent -= self.parsed
            self.parsed = 0
        self.changed()

    def restart(self, drop_parser: bool, reason: str) -> None:
        """Prepares the stream for a new process.

        Args:
            drop_parser: continue as plain text, because this stream caused the failure; others are replayed.
            reason: for the Degraded event.
        """
        self.opened = self.end_sent = False
        self.sent = self.parsed
        if self._plain or self.finish is not None:
            return
        if drop_parser or self._dropped:
            self._plain = True
            self.events.append(Degraded(reason if drop_parser else NOT_REPLAYED))
            if self._held:
                self.events.append(Content(self._held))
            self._held = ""
            self._emit_plain()
            self.changed()

    def _emit_plain(self) -> None:
        """Returns the unparsed text as content."""
        text = "".join(self.pieces[self.parsed :])
        if text:
            self.events.append(Content(text))
        self.pieces.clear()
        if self.tokens is not None:
            self.tokens.clear()
        self.parsed = self.sent = 0
        if self.ending is not None:
            self._finish()

    def _finish(self) -> None:
        assert self.ending is not None
        self.opened = False
        self.finish = self.finish or self.ending.parsed(self._calls, self._reasoning_tokens)

    def close(self) -> None:
        """Closes the stream; `changed` is not called any more."""
        self.changed = _ignore
        self._host.forget(self)


def _ignore() -> None:
    return None
