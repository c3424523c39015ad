"""A parser's process that cannot be started now: its streams are plain text, and a later attempt finds it well."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from services.common.errors import ErrorKind, SluiceError
from services.postprocess.parsers.isolated import host
from services.postprocess.parsers.isolated.engine_host import EngineHost
from services.postprocess.parsers.isolated.host import ParserHost
from services.postprocess.streams.factory import CustomParsers, StreamFactory
from services.postprocess.streams.stream import FinishReason, Limits, StreamOptions
from tests.support.parsing import said
from tests.support.vocabularies import tekken

SHOUTING = "tests.support.own_parsers:Shouting"
OPTIONS = StreamOptions("m", tool_parser=SHOUTING)
WAIT_S = 20


async def no_process(*command: Any, **options: Any) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


async def another_hello(self: ParserHost) -> Any:
    return {"another:Parser": []}


async def broken_pipe(self: asyncio.StreamReader, size: int) -> bytes:
    raise OSError(errno.EIO, "Input/output error")


@pytest.fixture
def deaths() -> list[str]:
    return []


@pytest.fixture
async def opener(deaths: list[str]) -> AsyncIterator[StreamFactory]:
    own = CustomParsers([SHOUTING], time_s=6.0, memory_mb=64)
    opener = StreamFactory(Limits(), own, on_death=lambda task, error: deaths.append(task))
    yield opener
    await opener.close()


async def one_stream(opener: StreamFactory) -> str:
    tokens = tekken().encode("fine again")
    async with asyncio.timeout(WAIT_S):
        events, _ = await opener.parse(tokens, OPTIONS, tekken().vocabulary, FinishReason.STOP, "x")
    return said(events).content


def without_processes(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(asyncio, "create_subprocess_exec", no_process)


def with_a_strange_hello(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(ParserHost, "_read", another_hello)


@pytest.mark.parametrize("trouble", [without_processes, with_a_strange_hello])
async def test_a_process_that_cannot_begin_again_is_tried_again_later(
    trouble: Callable[[pytest.MonkeyPatch], None],
    opener: StreamFactory,
    deaths: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "RETRY_S", 0.5)
    await opener.start()
    found = opener.host(SHOUTING)
    assert found is not None
    assert await one_stream(opener) == "FINE AGAIN"
    with monkeypatch.context() as patched:
        os.kill(found.pid, signal.SIGKILL)
        trouble(patched)
        assert await one_stream(opener) == "fine again"
        await asyncio.sleep(2 * host.RETRY_S)  # then the next stream is another attempt
        assert await one_stream(opener) == "fine again"
        assert found.pid == 0
    async with asyncio.timeout(WAIT_S):
        while await one_stream(opener) != "FINE AGAIN":
            pass
    assert deaths == []


async def test_a_pipe_that_fails_is_a_death_like_any_other(
    opener: StreamFactory, deaths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await opener.start()
    with monkeypatch.context() as patched:
        patched.setattr(asyncio.StreamReader, "readexactly", broken_pipe)
        assert await one_stream(opener) == "fine again"
    assert deaths == []


@pytest.mark.parametrize("trouble", [without_processes, with_a_strange_hello])
async def test_a_service_that_cannot_start_one_says_so(
    trouble: Callable[[pytest.MonkeyPatch], None], opener: StreamFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble(monkeypatch)
    with pytest.raises(SluiceError, match="cannot be started now") as refused:
        await opener.start()
    assert refused.value.kind is ErrorKind.UNAVAILABLE


async def test_an_engines_parsers_that_cannot_be_started_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    without_processes(monkeypatch)
    engine = EngineHost("vllm", "", 6.0, 64)
    with pytest.raises(SluiceError, match="cannot be started now") as refused:
        await engine.start()
    assert refused.value.kind is ErrorKind.UNAVAILABLE
    await engine.close()
