"""One generation's way from token ids to content, reasoning and tool calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from services.postprocess.detokenize.stream import Finish, FinishReason, Stream
from services.postprocess.detokenize.token_texts import TokenRecorder
from services.postprocess.parsers.base import Parser
from services.postprocess.parsers.events import CallStart, Content, Degraded, Event
from services.postprocess.parsers.watchdog import HELD_AT_MOST, WATCH, Expired

log = logging.getLogger(__name__)

KEPT_TWICE = 4_096
"""Characters fed to a parser that may be kept although they were told already."""

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
        self._last = ""  # the last piece that the parser was fed
        self._fed: list[str] = []  # pieces before that one, of which it held something
        self._fed_size = 0
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
        if held := parser.held_size:
            self._keep_last(held)
            if held > HELD_AT_MOST:
                self._fail(self._last_fed(held) + text, PARSER_TOO_LARGE)
                return
        self._last = text
        self._guarded(parser.feed, held, text)

    def _keep_last(self, held: int) -> None:
        """Keeps the last piece, of which the parser holds something, and forgets most of what it let go since.

        A piece after which it held nothing is never kept, so that plain text costs nothing here.
        """
        self._fed.append(self._last)
        self._fed_size += len(self._last)
        if self._fed_size > KEPT_TWICE + 2 * held:
            self._fed, self._fed_size = [self._last_fed(held)], held

    def _last_fed(self, held: int) -> str:
        """The end of what the parser was fed before, which is what it holds."""
        whole = "".join(self._fed)
        return whole[max(0, len(whole) - held) :]

    def _guarded(self, ask: Callable[..., list[Event]], held: int, *text: str) -> None:
        """Takes the parser's events; if it fails, the `held` characters that it held and the text become content."""
        try:
            WATCH.begun += 1
            WATCH.parsing = True
            found = ask(*text)
            WATCH.parsing = False
        except Expired:
            self._fail("".join((self._last_fed(held), *text)), PARSER_TOO_SLOW)
        except Exception:
            WATCH.parsing = False
            self._fail("".join((self._last_fed(held), *text)), PARSER_FAILED)
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
            self._guarded(self._parser.finish, held)
            self._parser = None
        self.finish = finish.parsed(self._calls, self._reasoning_tokens)
