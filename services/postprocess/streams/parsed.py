"""Streams that convert token ids to content, reasoning and tool calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from services.postprocess.detokenize.stream import Finish, FinishReason, Stream
from services.postprocess.detokenize.token_texts import TokenRecorder
from services.postprocess.parsers.base import Parser
from services.postprocess.parsers.events import CallStart, Content, Degraded, Event, Reasoning
from services.postprocess.parsers.watchdog import MAX_HELD, WATCH, Expired

log = logging.getLogger(__name__)

KEPT_TWICE = 4_096
"""Characters fed to a parser that may be kept although their events were returned."""

SHORTEST_RUN, RUN_GROWTH = 4, 4
"""Tokens of the first run without markup that is tried, and the factor from one to the next."""
SINGLE_TOKENS = 16
"""Tokens parsed one at a time between two attempts, after several in vain."""

PARSER_FAILED, PARSER_TOO_SLOW, PARSER_TOO_LARGE = "parser_failed", "parser_too_slow", "parser_too_large"


class ParsedStream:
    """A stream with a parser in this process.

    Stop strings apply to the complete text, including markup and reasoning, as in the engines. The text of each token
    is parsed separately, so batching makes no difference. A parser that raises, hangs (see `watchdog`) or holds too
    much text is dropped: its stream continues as plain text with a Degraded event, starting with the text the parser
    held.

    Attributes:
        events: events that were not taken yet.
        finish: how the stream ended, once all its events are available.
    """

    __slots__ = (
        "_calls",
        "_fed",
        "_fed_size",
        "_identity",
        "_last",
        "_parser",
        "_reasoning_tokens",
        "_stream",
        "events",
        "finish",
    )

    def __init__(self, stream: Stream, parser: Parser, identity: str = "") -> None:
        self._identity = identity
        self._stream = stream
        self._parser: Parser | None = parser
        self._reasoning_tokens = 0
        self._calls = False
        self._last = ""  # the last piece fed to the parser
        self._fed: list[str] = []  # earlier pieces of which the parser held a part
        self._fed_size = 0
        self.events: list[Event] = []
        self.finish: Finish | None = None

    def close(self) -> None:
        """Does nothing; for the interface of RemoteStream."""

    @property
    def recorder(self) -> TokenRecorder | None:
        return self._stream.recorder

    @property
    def tokens_seen(self) -> int:
        """Number of tokens received."""
        return self._stream.tokens_seen

    def take_events(self) -> list[Event]:
        """Returns the events since the last call."""
        events, self.events = self.events, []
        return events

    def feed(self, tokens: Sequence[int]) -> None:
        """Processes tokens."""
        if (found := self.feed_plain(tokens)) is not None:
            kind, text = found
            self.events.append(kind(text))
        else:
            self.parse(tokens)

    def parse(self, tokens: Sequence[int]) -> None:
        """Processes tokens whose text may have markup: one at a time, except runs that certainly have none.

        A run without markup is followed by a longer one; without such a run, more tokens precede the next attempt.
        """
        start, count, single = 0, len(tokens), 1
        while start < count:
            for token in tokens[start : start + single]:
                self._parse_token(token)
                if self.finish is not None:
                    return
            start, size = start + single, SHORTEST_RUN
            while start < count and (found := self.feed_plain(tokens[start : start + size])) is not None:
                kind, text = found
                self.events.append(kind(text))
                start, size = start + size, size * RUN_GROWTH
            single = 1 if size > SHORTEST_RUN else min(2 * single, SINGLE_TOKENS)

    def _parse_token(self, token: int) -> None:
        stream = self._stream
        if text := stream.feed_one(token):
            self._parse(text)
        if stream.finish is not None:
            self._close(stream.finish)
        elif self._parser is not None and self._parser.reasoning:
            self._reasoning_tokens += 1

    def feed_plain(self, tokens: Sequence[int]) -> tuple[type[Content | Reasoning], str] | None:
        """Processes tokens whose text certainly has no markup; returns None, without a change, for others.

        Returns:
            The type and the text of the only event, which is not added to `events`; earlier ones must have been taken.
        """
        parser = self._parser
        if parser is None or not (text := self._stream.peek(tokens)):
            return None
        kind = parser.plain(text)
        if kind is None:
            return None
        self._stream.tokens_seen += len(tokens)
        if kind is Reasoning:
            self._reasoning_tokens += len(tokens)
        return kind, text

    def end(self, reason: FinishReason, stop_token_id: int | None = None) -> None:
        """Ends the stream as the engine did; see Stream.end."""
        if text := self._stream.end(reason, stop_token_id):
            self._parse(text)
        if self._stream.finish is not None:
            self._close(self._stream.finish)

    def _parse(self, text: str) -> None:
        parser = self._parser
        if parser is None:
            self.events.append(Content(text))
            return
        if held := parser.held_size:
            self._keep_last(held)
            if held > MAX_HELD:
                self._fail(self._last_fed(held) + text, PARSER_TOO_LARGE)
                return
        self._last = text
        self._guarded(parser.feed, held, text)

    def _keep_last(self, held: int) -> None:
        """Keeps the last piece, of which the parser holds a part, and trims text that it has released.

        A piece after which the parser held nothing is not kept, so plain text has no overhead.
        """
        self._fed.append(self._last)
        self._fed_size += len(self._last)
        if self._fed_size > KEPT_TWICE + 2 * held:
            self._fed, self._fed_size = [self._last_fed(held)], held

    def _last_fed(self, held: int) -> str:
        """Returns the end of the text fed to the parser, which is the text it holds."""
        fed = "".join(self._fed)
        return fed[max(0, len(fed) - held) :]

    def _guarded(self, parse: Callable[..., list[Event]], held: int, *text: str) -> None:
        """Adds the parser's events; if it fails, the `held` characters and the text become content."""
        try:
            WATCH.begun += 1
            WATCH.parsing = True
            found = parse(*text)
            WATCH.parsing = False
        except Expired:
            self._fail("".join((self._last_fed(held), *text)), PARSER_TOO_SLOW)
        except Exception:
            WATCH.parsing = False
            self._fail("".join((self._last_fed(held), *text)), PARSER_FAILED)
        else:
            self._add_events(found)

    def _add_events(self, found: list[Event]) -> None:
        for event in found:
            self.events.append(event)
            if type(event) is CallStart:
                self._calls = True

    def _fail(self, text: str, reason: str) -> None:
        log.error(
            "dropping a failed parser; its stream continues as plain text",
            exc_info=reason == PARSER_FAILED,
            extra={"request": self._identity, "reason": reason},
        )
        self._parser = None
        self._fed.clear()
        self.events.append(Degraded(reason))
        if text:
            self.events.append(Content(text))

    def _close(self, finish: Finish) -> None:
        if self.finish is not None:
            return
        if self._parser is not None:
            if held := self._parser.held_size:
                self._keep_last(held)
            parser = self._parser
            self._guarded(parser.finish, held)
            self._parser = None
            if parser.retracted:
                self._reasoning_tokens = 0
        self.finish = finish.parsed(self._calls, self._reasoning_tokens)
