"""One generation's way from token ids to content, reasoning and tool calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from services.postprocess.parsers.contract import Parser
from services.postprocess.parsers.events import CallStart, Content, Degraded, Event
from services.postprocess.parsers.watch import HELD_AT_MOST, WATCH, Expired
from services.postprocess.stream import Finish, FinishReason, Stream
from services.postprocess.token_texts import TokenRecorder

log = logging.getLogger(__name__)

PARSER_FAILED, PARSER_TOO_SLOW, PARSER_TOO_LARGE = "parser_failed", "parser_too_slow", "parser_too_large"


class ParsedStream:
    """A stream whose text goes through a parser in this process.

    Stop strings are looked for in the whole text, markup and reasoning included, as the engines do. Every token's
    text is parsed by itself, so how tokens come in batches makes no difference. A parser that raises, loops (see
    `watch`) or holds too much ends: its stream goes on as plain text with a `degraded` mark, and what the parser held
    comes first.

    Attributes:
        events: what became certain and was not taken yet.
        finish: how the stream ended, once all its events are there.
    """

    __slots__ = ("_calls", "_identity", "_parser", "_reasoning_tokens", "_stream", "events", "finish")

    def __init__(self, stream: Stream, parser: Parser, identity: str = "") -> None:
        self._identity = identity
        self._stream = stream
        self._parser: Parser | None = parser
        self._reasoning_tokens = 0
        self._calls = False
        self.events: list[Event] = []
        self.finish: Finish | None = None

    def close(self) -> None:
        """Nobody wants to hear of it any more."""

    @property
    def recorder(self) -> TokenRecorder | None:
        """See Stream."""
        return self._stream.recorder

    @property
    def tokens_seen(self) -> int:
        """Tokens taken so far."""
        return self._stream.tokens_seen

    def take_events(self) -> list[Event]:
        """What became certain since the last time."""
        events, self.events = self.events, []
        return events

    def feed(self, tokens: Sequence[int]) -> None:
        """The next tokens."""
        stream = self._stream
        for token in tokens:
            text = stream.feed_one(token)
            if text:
                self._parse(text)
            if stream.finish is not None:
                self._close(stream.finish)
                return
            if self._parser is not None and self._parser.reasoning:
                self._reasoning_tokens += 1

    def end(self, reason: FinishReason, stop_token_id: int | None = None) -> None:
        """The engine has ended the stream; see Stream.end."""
        if text := self._stream.end(reason, stop_token_id):
            self._parse(text)
        if self._stream.finish is not None:
            self._close(self._stream.finish)

    def _parse(self, text: str) -> None:
        parser = self._parser
        if parser is None:
            self.events.append(Content(text))
            return
        held = parser.held
        if len(held) > HELD_AT_MOST:
            self._fail(held + text, PARSER_TOO_LARGE)
            return
        self._guarded(parser.feed, held, text)

    def _guarded(self, ask: Callable[..., list[Event]], held: str, *text: str) -> None:
        """What the parser says; if it fails, what it held and the text become content."""
        try:
            WATCH.begun += 1
            WATCH.parsing = True
            found = ask(*text)
            WATCH.parsing = False
        except Expired:
            self._fail("".join((held, *text)), PARSER_TOO_SLOW)
        except Exception:
            WATCH.parsing = False
            self._fail("".join((held, *text)), PARSER_FAILED)
        else:
            self._tell(found)

    def _tell(self, found: list[Event]) -> None:
        for event in found:
            self.events.append(event)
            if type(event) is CallStart:
                self._calls = True

    def _fail(self, text: str, reason: str) -> None:
        said = "a parser ends; its stream goes on as plain text"
        log.error(said, exc_info=reason == PARSER_FAILED, extra={"request": self._identity, "reason": reason})
        self._parser = None
        self.events.append(Degraded(reason))
        if text:
            self.events.append(Content(text))

    def _close(self, finish: Finish) -> None:
        if self.finish is not None:
            return
        if self._parser is not None:
            self._guarded(self._parser.finish, self._parser.held)
            self._parser = None
        self.finish = finish.parsed(self._calls, self._reasoning_tokens)
