"""A built-in parser that loops or hoards hurts its own stream only: it runs in this process, on the event loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.postprocess.detokenize.stream import FinishReason, Limits, Stream, StreamOptions
from services.postprocess.parsers.base import Parser, ParserContext
from services.postprocess.parsers.events import Content, Event
from services.postprocess.parsers.watchdog import MAX_HELD, WATCH
from services.postprocess.streams.parsed import ParsedStream
from tests.support.data.vocabularies import tekken
from tests.support.oracles.parsing import ParsedDelta, said


class Stuck(Parser):
    """Loops at `@`, and at the end where it saw a `#`."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._at_the_end = False

    def feed(self, text: str) -> list[Event]:
        """See Parser."""
        self._at_the_end = self._at_the_end or "#" in text
        while "@" in text:
            try:
                sum(range(1000))
            except Exception:
                continue
        return [Content(text.upper())]

    def finish(self) -> list[Event]:
        """See Parser."""
        while self._at_the_end:
            pass
        return []


class Hoarder(Parser):
    """Holds everything, many times over."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._kept = ""

    def feed(self, text: str) -> list[Event]:
        """See Parser."""
        self._kept += text * (MAX_HELD // 4)
        return []

    def finish(self) -> list[Event]:
        """See Parser."""
        return [Content(self._kept)]

    @property
    def held(self) -> str:
        """See Parser."""
        return self._kept


@pytest.fixture
def watched() -> Iterator[None]:
    WATCH.start(0.1)
    yield
    WATCH.stop()


def stream_of(parser: Parser) -> ParsedStream:
    return ParsedStream(Stream(StreamOptions("m"), tekken().vocabulary, Limits()), parser)


def heard(stream: ParsedStream, text: str) -> ParsedDelta:
    stream.feed(tekken().encode(text))
    stream.end(FinishReason.STOP)
    assert stream.finish is not None
    return said(stream.events)


def test_a_parser_that_loops_leaves_plain_text(watched: None) -> None:
    found = heard(stream_of(Stuck(ParserContext())), "one @ and more")
    assert found.content.lower() == "one @ and more"
    assert found.content.startswith("ONE")
    assert found.content.endswith(" and more")
    assert found.degraded == {"parser_too_slow"}


def test_one_that_loops_at_the_end_does_so_too(watched: None) -> None:
    found = heard(stream_of(Stuck(ParserContext())), "one # and more")
    assert (found.content, found.degraded) == ("ONE # AND MORE", frozenset({"parser_too_slow"}))


def test_its_neighbour_has_its_parser_still(watched: None) -> None:
    culprit, neighbour = stream_of(Stuck(ParserContext())), stream_of(Stuck(ParserContext()))
    neighbour.feed(tekken().encode("before "))
    heard(culprit, "@")
    found = heard(neighbour, "after")
    assert (found.content, found.degraded) == ("BEFORE AFTER", frozenset())


def test_many_pieces_that_are_quick_are_no_loop(watched: None) -> None:
    found = heard(stream_of(Stuck(ParserContext())), "word " * 20_000)
    assert found.degraded == frozenset()


def test_a_parser_that_holds_too_much_gives_it_back_and_ends() -> None:
    found = heard(stream_of(Hoarder(ParserContext())), "x y z a b c d e f g")
    assert found.degraded == {"parser_too_large"}
    assert found.content.endswith(" g")
    assert len(found.content) < 2 * MAX_HELD
