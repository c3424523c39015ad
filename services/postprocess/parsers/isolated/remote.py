"""A stream whose parser runs in another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from services.postprocess.detokenize.stream import Finish, FinishReason, Stream
from services.postprocess.detokenize.token_texts import TokenRecorder
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.events import CallStart, Content, Degraded, Event

REPLAYED_PIECES = 262_144
"""Pieces of one stream that are kept so that it survives the death of the process; a longer one becomes plain text."""

NOT_REPLAYED = "parser_lost"


class Host(Protocol):
    """Where remote parsers run."""

    def changed(self, stream: RemoteStream) -> None:
        """A stream has something to parse."""

    def forget(self, stream: RemoteStream) -> None:
        """Nobody wants to hear of a stream any more."""


class RemoteStream:
    """The same as a ParsedStream, only that its events come later: `changed` is called when there are any.

    Attributes:
        number: on the pipe.
        pieces: the text of each token; the first `told` of them are answered.
        sent: how many of them the process was given.
        tokens: the token of each piece, -1 for none; None where the parser does not want them.
        opened: the process knows this stream.
        forgiven: the process died once while it parsed this stream.
        ending: what the engine said at the end, None before; the last piece then is the text that came with it.
    """

    def __init__(
        self, number: int, stream: Stream, names: ParserNames, context: ParserContext, host: Host, tokens: bool = False
    ) -> None:
        self.number = number
        self.names = names
        self.context = context
        self.pieces: list[str] = []
        self.tokens: list[int] | None = [] if tokens else None
        self.told = 0
        self.sent = 0
        self.opened = False
        self.forgiven = False
        self.end_sent = False
        self.ending: Finish | None = None
        self.events: list[Event] = []
        self.finish: Finish | None = None
        self.changed: Callable[[], None] = _nobody
        self._stream = stream
        self._host = host
        self._held = ""
        self._plain = False
        self._dropped = False  # answered pieces are not kept any more
        self._calls = False
        self._reasoning_tokens = 0

    @property
    def recorder(self) -> TokenRecorder | None:
        """See Stream."""
        return self._stream.recorder

    @property
    def tokens_seen(self) -> int:
        """Tokens taken so far."""
        return self._stream.tokens_seen

    @property
    def behind(self) -> bool:
        """The process has not answered everything yet."""
        return self.told < len(self.pieces)

    def take_events(self) -> list[Event]:
        """What became certain since the last time."""
        events, self.events = self.events, []
        return events

    def feed(self, tokens: Sequence[int]) -> None:
        """The next tokens."""
        stream = self._stream
        if self.ending is not None:
            return
        ids = self.tokens
        for token in tokens:
            text = stream.feed_one(token)
            if stream.finish is not None:
                self._last(text, token, stream.finish)
                return
            self.pieces.append(text)
            if ids is not None:
                ids.append(token)
        self._ask()

    def tokens_of(self, start: int, end: int | None = None) -> list[int] | None:
        """The tokens of some pieces; None where the parser does not want them."""
        return None if self.tokens is None else self.tokens[start:end]

    def end(self, reason: FinishReason, stop_token_id: int | None = None) -> None:
        """The engine has ended the stream; see Stream.end."""
        text = self._stream.end(reason, stop_token_id)
        if self.ending is None and self._stream.finish is not None:
            self._last(text, -1, self._stream.finish)

    def _last(self, text: str, token: int, finish: Finish) -> None:
        self.pieces.append(text)
        if self.tokens is not None:
            self.tokens.append(token)
        self.ending = finish
        self._ask()

    def _ask(self) -> None:
        if self._plain:
            self._pass_on()
        else:
            self._host.changed(self)

    def answer(self, pieces: int, events: list[Event], held: str, reasoning_tokens: int, failed: bool) -> None:
        """The process has parsed the next `pieces` pieces."""
        self.told += pieces
        self._held = held
        self._reasoning_tokens += reasoning_tokens
        self._calls = self._calls or any(isinstance(event, CallStart) for event in events)
        self.events += events
        if failed:
            self._plain = True
            self._pass_on()
        elif self.end_sent and self.told == len(self.pieces):
            self._finish()
        if len(self.pieces) > REPLAYED_PIECES:
            self._dropped = True
            del self.pieces[: self.told]
            if self.tokens is not None:
                del self.tokens[: self.told]
            self.sent -= self.told
            self.told = 0
        self.changed()

    def lost(self, guilty: bool, reason: str) -> None:
        """The process is gone.

        Args:
            guilty: because of this stream, which goes on as plain text; others begin again where they were.
            reason: for the `degraded` mark.
        """
        self.opened = self.end_sent = False
        self.sent = self.told
        if self._plain or self.finish is not None:
            return
        if guilty or self._dropped:
            self._plain = True
            self.events.append(Degraded(reason if guilty else NOT_REPLAYED))
            if self._held:
                self.events.append(Content(self._held))
            self._held = ""
            self._pass_on()
            self.changed()

    def _pass_on(self) -> None:
        """What nobody has parsed is content."""
        text = "".join(self.pieces[self.told :])
        if text:
            self.events.append(Content(text))
        self.pieces.clear()
        if self.tokens is not None:
            self.tokens.clear()
        self.told = self.sent = 0
        if self.ending is not None:
            self._finish()

    def _finish(self) -> None:
        assert self.ending is not None
        self.opened = False
        self.finish = self.finish or self.ending.parsed(self._calls, self._reasoning_tokens)

    def close(self) -> None:
        """Nobody listens any more."""
        self.changed = _nobody
        self._host.forget(self)


def _nobody() -> None:
    return None
