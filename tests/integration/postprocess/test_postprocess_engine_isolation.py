"""An engine's own parsers that raise, loop, grow or die, in the processes they run in; the engine is a stand-in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.common.child_rpc.child import ChildLimits
from services.postprocess.detokenize.stream import FinishReason, Limits, StreamOptions
from services.postprocess.parsers.remote import RemoteStream
from services.postprocess.streams.factory import CustomParsers, StreamFactory
from tests.support.data.vocabularies import tekken
from tests.support.oracles.parsing import TOOLS, ParsedDelta, said
from tests.support.waiting import until

PACKAGE = Path(__file__).parents[2] / "support" / "fake_vllm_package"
OPTIONS = StreamOptions("m", tool_parser="vllm:hermes", tools_json=json.dumps(TOOLS).encode())
WAIT_S = 120


@pytest.fixture
async def stream_factory(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StreamFactory]:
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE))
    stream_factory = StreamFactory(Limits(), CustomParsers(limits=ChildLimits(6.0, 64), engines={"vllm": ""}))
    await stream_factory.start()
    await stream_factory.prepare(stream_factory.plan(OPTIONS, tekken().vocabulary, ""))
    yield stream_factory
    await stream_factory.close()


def opened(stream_factory: StreamFactory) -> RemoteStream:
    vocabulary = tekken().vocabulary
    stream = stream_factory.begin(OPTIONS, vocabulary, stream_factory.plan(OPTIONS, vocabulary, "request"))
    assert isinstance(stream, RemoteStream)
    return stream


async def heard(stream: RemoteStream) -> ParsedDelta:
    news = asyncio.Event()
    stream.changed = news.set
    async with asyncio.timeout(WAIT_S):
        while stream.finish is None:
            await news.wait()
            news.clear()
    return said(stream.events)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [("RAISE", "parser_failed"), ("LOOP", "parser_too_slow"), ("GROW", "parser_failed"), ("DIE", "parser_died")],
)
async def test_a_bad_stream_becomes_plain_text_and_its_neighbours_notice_nothing(
    stream_factory: StreamFactory, bad: str, reason: str
) -> None:
    culprit, *neighbours = [opened(stream_factory) for _ in range(4)]
    for stream in (*neighbours, culprit):
        stream.feed(tekken().encode("before "))
    for stream in neighbours:
        stream.feed(tekken().encode("and after"))
        stream.end(FinishReason.STOP)
    culprit.feed(tekken().encode(f"{bad} and so on"))
    culprit.end(FinishReason.STOP)
    found = await heard(culprit)
    assert found.content.lower() == f"before {bad} and so on".lower(), "nothing is lost, nothing comes twice"
    assert found.content.endswith(" and so on"), "plain, not in capitals"
    assert found.degraded == {reason}
    for stream in neighbours:
        found = await heard(stream)
        assert (found.content, found.degraded) == ("BEFORE AND AFTER", frozenset())


async def test_parsers_of_a_removed_model_are_unloaded_after_its_streams_and_loaded_again(
    stream_factory: StreamFactory,
) -> None:
    host = stream_factory.host("vllm:hermes")
    assert host is not None
    for _ in range(2):
        await stream_factory.prepare(stream_factory.plan(OPTIONS, tekken().vocabulary, ""))
        stream = opened(stream_factory)
        stream_factory.release(stream.context.source)
        stream.feed(tekken().encode("still parsed"))
        stream.end(FinishReason.STOP)
        assert (await heard(stream)).content == "STILL PARSED"
        assert host.pid
        stream.close()
        await until(lambda: not host.pid, WAIT_S)
