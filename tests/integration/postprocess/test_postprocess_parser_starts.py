"""A parser's process that cannot be started now: its streams are plain text, and a later attempt finds it well."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.child_rpc.child import ChildLimits
from services.common.child_rpc.process import Child
from services.postprocess.detokenize.stream import FinishReason, Limits, StreamOptions
from services.postprocess.parsers.isolated import host
from services.postprocess.parsers.isolated.engine_host import EngineHost
from services.postprocess.streams.factory import CustomParsers, StreamFactory
from tests.support.data.vocabularies import tekken
from tests.support.oracles.parsing import said

SHOUTING = "tests.support.fakes.own_parsers:Shouting"
OPTIONS = StreamOptions("m", tool_parser=SHOUTING)
WAIT_S = 20


def no_process(*command: Any, **options: Any) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


async def another_hello(self: Child) -> bytes:
    return b'{"another:Parser": []}'


async def broken_pipe(self: Child) -> bytes:
    raise OSError(errno.EIO, "Input/output error")


@pytest.fixture
def deaths() -> list[str]:
    return []


@pytest.fixture
async def stream_factory(deaths: list[str]) -> AsyncIterator[StreamFactory]:
    own = CustomParsers([SHOUTING], limits=ChildLimits(6.0, 64))
    stream_factory = StreamFactory(Limits(), own, on_death=lambda task, error: deaths.append(task))
    yield stream_factory
    await stream_factory.close()


async def one_stream(stream_factory: StreamFactory) -> str:
    tokens = tekken().encode("fine again")
    async with asyncio.timeout(WAIT_S):
        events, _ = await stream_factory.parse(tokens, OPTIONS, tekken().vocabulary, FinishReason.STOP, "x")
    return said(events).content


def without_processes(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(subprocess, "Popen", no_process)


def with_a_strange_hello(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Child, "receive", another_hello)


@pytest.mark.parametrize("trouble", [without_processes, with_a_strange_hello])
async def test_a_process_that_cannot_begin_again_is_tried_again_later(
    trouble: Callable[[pytest.MonkeyPatch], None],
    stream_factory: StreamFactory,
    deaths: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "RETRY_S", 0.5)
    await stream_factory.start()
    found = stream_factory.host(SHOUTING)
    assert found is not None
    assert await one_stream(stream_factory) == "FINE AGAIN"
    with monkeypatch.context() as patched:
        os.kill(found.pid, signal.SIGKILL)
        trouble(patched)
        assert await one_stream(stream_factory) == "fine again"
        await asyncio.sleep(2 * host.RETRY_S)  # then the next stream is another attempt
        assert await one_stream(stream_factory) == "fine again"
        assert found.pid == 0
    async with asyncio.timeout(WAIT_S):
        while await one_stream(stream_factory) != "FINE AGAIN":
            pass
    assert deaths == []


async def test_a_pipe_that_fails_is_a_death_like_any_other(
    stream_factory: StreamFactory, deaths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await stream_factory.start()
    with monkeypatch.context() as patched:
        patched.setattr(Child, "receive", broken_pipe)
        assert await one_stream(stream_factory) == "fine again"
    assert deaths == []


@pytest.mark.parametrize("trouble", [without_processes, with_a_strange_hello])
async def test_a_service_that_cannot_start_one_says_so(
    trouble: Callable[[pytest.MonkeyPatch], None], stream_factory: StreamFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble(monkeypatch)
    with pytest.raises(SluiceError, match="cannot be started now") as refused:
        await stream_factory.start()
    assert refused.value.kind is ErrorKind.UNAVAILABLE


async def test_an_engines_parsers_that_cannot_be_started_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    without_processes(monkeypatch)
    engine = EngineHost("vllm", "", ChildLimits(6.0, 64))
    with pytest.raises(SluiceError, match="cannot be started now") as refused:
        await engine.start()
    assert refused.value.kind is ErrorKind.UNAVAILABLE
    await engine.close()
