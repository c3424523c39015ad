"""The user's own parsers, in a process of their own: they may raise, loop, grow or die without hurting a neighbour."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from services.common.base.errors import SluiceError, unavailable
from services.common.child_rpc.child import ChildLimits
from services.postprocess.detokenize.stream import FinishReason, Limits, StreamOptions
from services.postprocess.parsers.events import Degraded
from services.postprocess.parsers.isolated import host
from services.postprocess.parsers.isolated.host import ParserHost
from services.postprocess.parsers.remote import RemoteStream
from services.postprocess.streams.factory import AnyParsed, CustomParsers, StreamFactory
from tests.support.data.vocabularies import tekken
from tests.support.oracles.parsing import ParsedDelta, said

SHOUTING = "tests.support.fakes.own_parsers:Shouting"
OPTIONS = StreamOptions("m", tool_parser=SHOUTING)
WAIT_S = 60


@pytest.fixture
async def stream_factory() -> AsyncIterator[StreamFactory]:
    stream_factory = StreamFactory(Limits(), CustomParsers([SHOUTING], limits=ChildLimits(6.0, 64)))
    await stream_factory.start()
    yield stream_factory
    await stream_factory.close()


class EventListener:
    """One stream and what it says."""

    def __init__(self, stream_factory: StreamFactory, options: StreamOptions = OPTIONS) -> None:
        vocabulary = tekken().vocabulary
        plan = stream_factory.plan(options, vocabulary, "request-1")
        self.stream: AnyParsed = stream_factory.parsed(options, vocabulary, plan)
        assert isinstance(self.stream, RemoteStream)
        self.news = asyncio.Event()
        self.stream.changed = self.news.set
        self.said = 0

    def feed(self, text: str) -> None:
        self.stream.feed(tekken().encode(text))

    def end(self) -> None:
        self.stream.end(FinishReason.STOP)

    async def heard(self) -> ParsedDelta:
        async with asyncio.timeout(WAIT_S):
            while self.stream.finish is None:
                await self.news.wait()
                self.news.clear()
        return said(self.stream.events)

    async def until(self, text: str) -> None:
        """Waits until so much was answered."""
        async with asyncio.timeout(WAIT_S):
            while text not in said(self.stream.events).content:
                await self.news.wait()
                self.news.clear()


async def test_it_says_what_the_parser_says(stream_factory: StreamFactory) -> None:
    listener = EventListener(stream_factory)
    for piece in ("one ?hm ", "and !f! ", "two 😀"):
        listener.feed(piece)
    listener.end()
    heard = await listener.heard()
    assert (heard.content, heard.reasoning) == ("ONE AND TWO 😀", "?hm ")
    assert [call[:2] for call in heard.calls] == [("f", "{}")]
    assert heard.degraded == frozenset()
    finish = listener.stream.finish
    assert finish is not None
    assert finish.reason is FinishReason.TOOL_CALLS
    assert finish.reasoning_tokens > 0


async def test_a_hundred_streams_share_the_process(stream_factory: StreamFactory) -> None:
    listeners = [EventListener(stream_factory) for _ in range(100)]
    for round_ in range(5):
        for index, listener in enumerate(listeners):
            listener.feed(f"w{index} r{round_} ")
        await asyncio.sleep(0)
    for listener in listeners:
        listener.end()
    for index, listener in enumerate(listeners):
        assert (await listener.heard()).content == "".join(f"W{index} R{round_} " for round_ in range(5))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [("RAISE", "parser_failed"), ("LOOP", "parser_too_slow"), ("GROW", "parser_failed"), ("DIE", "parser_died")],
)
async def test_a_bad_stream_becomes_plain_text_and_its_neighbours_notice_nothing(
    stream_factory: StreamFactory, bad: str, reason: str
) -> None:
    neighbours = [EventListener(stream_factory) for _ in range(3)]
    culprit = EventListener(stream_factory)
    for listener in (*neighbours, culprit):
        listener.feed("before mid")
    await culprit.until("BEFORE ")
    for listener in neighbours:
        listener.feed("dle !f! after")
    culprit.feed(f"dle {bad} and so on")
    for listener in (*neighbours, culprit):
        listener.end()
    heard = await culprit.heard()
    assert heard.content.startswith("BEFORE ")
    assert heard.content.lower() == f"before middle {bad} and so on".lower(), "nothing is lost, nothing comes twice"
    assert heard.content.endswith(" and so on")
    assert heard.degraded == {reason}
    for listener in neighbours:
        heard = await listener.heard()
        assert (heard.content, heard.degraded) == ("BEFORE MIDDLE AFTER", frozenset())
        assert [call[0] for call in heard.calls] == ["f"]
    later = EventListener(stream_factory)
    later.feed("fine again")
    later.end()
    assert (await later.heard()).content == "FINE AGAIN"


async def test_a_killed_process_is_replaced_and_streams_go_on_where_they_were(stream_factory: StreamFactory) -> None:
    listeners = [EventListener(stream_factory) for _ in range(20)]
    for listener in listeners:
        listener.feed("first sec")
    for listener in listeners:
        await listener.until("FIRST ")
    host = stream_factory.host(SHOUTING)
    assert host is not None
    os.kill(host.pid, signal.SIGKILL)
    for listener in listeners:
        listener.feed("ond !f! third")
        listener.end()
    for listener in listeners:
        heard = await listener.heard()
        assert (heard.content, heard.degraded) == ("FIRST SECOND THIRD", frozenset())
        assert [call[0] for call in heard.calls] == ["f"]


async def test_a_parser_that_was_given_up_comes_back_under_load(
    stream_factory: StreamFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def one_more() -> str:
        listener = EventListener(stream_factory)
        listener.feed("fine again")
        listener.end()
        content = (await listener.heard()).content
        listener.stream.close()
        return content

    async def cannot_start(self: ParserHost) -> None:
        raise unavailable("There is no memory for it now.")

    found = stream_factory.host(SHOUTING)
    assert found is not None
    assert await one_more() == "FINE AGAIN"
    monkeypatch.setattr(host, "RETRY_S", 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(ParserHost, "_start", cannot_start)
        os.kill(found.pid, signal.SIGKILL)
        for _ in range(host.MAX_DEATHS + 1):
            assert await one_more() == "fine again"
    async with asyncio.timeout(WAIT_S):
        while await one_more() != "FINE AGAIN":  # streams come without a pause
            pass


async def test_a_closed_stream_is_forgotten_there_too(stream_factory: StreamFactory) -> None:
    listener, other = EventListener(stream_factory), EventListener(stream_factory)
    listener.feed("LOO")
    listener.stream.close()
    other.feed("fine ")
    other.end()
    assert (await other.heard()).content == "FINE "
    host = stream_factory.host(SHOUTING)
    assert host is not None
    other.stream.close()
    assert host.streams == 0


async def test_parsers_can_be_combined_with_built_in_ones(stream_factory: StreamFactory) -> None:
    listener = EventListener(stream_factory, StreamOptions("m", tool_parser=SHOUTING, reasoning_parser="think"))
    listener.feed("<think>quiet</think> loud")
    listener.end()
    heard = await listener.heard()
    assert (heard.reasoning, heard.content) == ("quiet", "LOUD")


async def test_special_tokens_that_an_own_parser_names_are_seen(stream_factory: StreamFactory) -> None:
    listener = EventListener(stream_factory)
    listener.stream.feed([*tekken().encode("a "), 9, *tekken().encode(" b")])
    listener.end()
    assert (await listener.heard()).content == "A [TOOL_CALLS] B"


@pytest.mark.parametrize(
    "name", ["tests.support.fakes.own_parsers:Broken", "tests.support.fakes.own_parsers:Gone", "no.module:X"]
)
async def test_a_class_that_is_no_parser_is_refused_at_the_start(name: str) -> None:
    stream_factory = StreamFactory(Limits(), CustomParsers([name]))
    with pytest.raises(SluiceError, match="does not start"):
        await stream_factory.start()
    await stream_factory.close()


async def test_only_listed_classes_can_be_named(stream_factory: StreamFactory) -> None:
    options = StreamOptions("m", tool_parser="tests.support.fakes.own_parsers:Broken")
    with pytest.raises(SluiceError, match=r"not available; use one of auto, .*Shouting") as caught:
        stream_factory.plan(options, tekken().vocabulary, "")
    assert caught.value.code == "no_such_parser"


async def test_a_whole_sequence_at_once(stream_factory: StreamFactory) -> None:
    tokens = tekken().encode("all at once !f! ")
    events, finish = await stream_factory.parse(tokens, OPTIONS, tekken().vocabulary, FinishReason.STOP, "x")
    assert said(events).content == "ALL AT ONCE "
    assert finish.reason is FinishReason.TOOL_CALLS
    assert not any(isinstance(event, Degraded) for event in events)
