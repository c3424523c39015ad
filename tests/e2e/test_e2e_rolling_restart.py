"""Every service is restarted in turn under load, one process after the other, and no request fails."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest

from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.rolling_suite import RollingSuite

pytestmark = pytest.mark.slow

WAIT_S = 120
CLIENTS = 12
ORDER = ("gateway", "preprocess", "router", "postprocess", "worker")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RollingSuite]:
    with RollingSuite(build_tiny_model(tmp_path_factory.mktemp("rolling") / "tiny")) as running:
        yield running


class Balancer:
    """A TCP balancer as simple as they come: the first gateway that does not refuse the connection, in turns."""

    def __init__(self, targets: Sequence[tuple[str, int]]) -> None:
        self._targets = list(targets)
        self._turn = 0
        self._passing: set[object] = set()  # asyncio keeps only weak references to tasks

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._turn += 1
        self._passing.add(asyncio.current_task())
        try:
            await self._to_one(reader, writer)
        finally:
            writer.close()
            self._passing.discard(asyncio.current_task())

    async def _to_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        turn = self._turn % len(self._targets)
        for host, port in self._targets[turn:] + self._targets[:turn]:
            with suppress(ConnectionRefusedError):
                far_reader, far_writer = await asyncio.open_connection(host, port)
                await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
                far_writer.close()
                return

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        with suppress(OSError, RuntimeError):
            writer.write_eof()


@asynccontextmanager
async def balanced(suite: RollingSuite) -> AsyncIterator[str]:
    balancer = Balancer([("127.0.0.1", suite.ports[name]) for name in suite.of("gateway")])
    server = await asyncio.start_server(balancer.pass_on, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class Load:
    """Clients that ask one request after the other, streamed and whole."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.outcomes: Counter[str] = Counter()
        self.stopping = False

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(CLIENTS)))

    async def _client(self, number: int) -> None:
        limits = httpx.Limits(max_keepalive_connections=0 if number % 2 else 1)
        async with httpx.AsyncClient(base_url=self._url, timeout=WAIT_S, limits=limits) as client:
            asked = 0
            while not self.stopping:
                asked += 1
                body: dict[str, Any] = {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": f"Client {number}, question {asked}."}],
                    "max_tokens": 40,
                    "ignore_eos": True,
                }
                try:
                    self.outcomes[await (self._streamed if number % 3 else self._whole)(client, body)] += 1
                except httpx.HTTPError as error:
                    self.outcomes[f"{type(error).__name__}: {error}"] += 1

    async def _whole(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            return answer.text
        return "ok" if answer.json()["usage"]["completion_tokens"] == 40 else "too short"

    async def _streamed(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            text = (await response.aread()).decode()
        if response.status_code != 200 or '"error"' in text:
            return text[-300:]
        return "ok" if '"finish_reason":"length"' in text and "data: [DONE]" in text else f"cut: {text[-100:]}"


@pytest.mark.parametrize("service", ORDER)
async def test_a_restart_under_load_fails_no_request(suite: RollingSuite, service: str) -> None:
    async with balanced(suite) as url:
        load = Load(url)
        running = asyncio.create_task(load.run())
        try:
            await enough(load, 2 * CLIENTS)
            for name in suite.of(service):
                await asyncio.to_thread(suite.restart, name, signal.SIGTERM)
                await enough(load, load.outcomes.total() + CLIENTS)
        finally:
            load.stopping = True
            await asyncio.wait_for(running, WAIT_S)
    assert set(load.outcomes) == {"ok"}, load.outcomes
    assert load.outcomes["ok"] >= (2 + len(suite.of(service))) * CLIENTS


async def enough(load: Load, answers: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while load.outcomes.total() < answers:
        assert time.monotonic() < deadline, load.outcomes
        await asyncio.sleep(0.02)
