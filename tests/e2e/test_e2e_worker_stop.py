"""A worker that is told to stop under load: what it runs ends there, what is new goes elsewhere, nothing fails."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from services.common.net.ports import free_port
from sluice.v1 import worker_pb2, worker_pb2_grpc
from tests.support.data.small_tekken import small_tekken
from tests.support.servers.suite import Suite

pytestmark = pytest.mark.slow

CLIENTS = 16
TOKENS = 100  # two seconds of a worker that is not held up
GRACE = ("--grace-s", "0.5", "--drain-s", "10")
PACE = ("--engine-args", "timing=fixed,fixed_step_ms=20")
WAIT_S = 120
MIGRATIONS = re.compile(r"^sluice_gateway_migrations_total\{.*\} ([1-9].*)$", re.MULTILINE)


@asynccontextmanager
async def second_worker(router: str, log: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A worker beside the suite's own, which registers by itself, and its address."""
    address = f"127.0.0.1:{free_port()}"
    with log.open("wb") as written:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.worker", "--listen", address, "--worker-id", "second"),
            *("--model", f"tekken={small_tekken()}"),
            *("--routers", router, *GRACE, *PACE),
            stderr=written,
        )
    try:
        yield process, address
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Load:
    """Clients that stream one completion after the other."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.outcomes: Counter[str] = Counter()
        self.stopping = False

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=WAIT_S) as client:
            await asyncio.gather(*(self._ask(client, number) for number in range(CLIENTS)))

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        asked = 0
        while not self.stopping:
            asked += 1
            body: dict[str, Any] = {
                "model": "tekken",
                "prompt": f"Client {number} asks question {asked}.",
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with client.stream("POST", "/v1/completions", json=body) as response:
                text = (await response.aread()).decode()
            whole = f'"completion_tokens":{TOKENS}' in text and text.rstrip().endswith("data: [DONE]")
            sound = response.status_code == 200 and whole and '"error"' not in text
            self.outcomes["ok" if sound else f"{response.status_code}: {text[-300:]}"] += 1


async def test_sigterm_under_load(tmp_path: Path) -> None:
    env = {"SLUICE_WORKER_ENGINE_ARGS": "timing=fixed,fixed_step_ms=20"}
    log = tmp_path / "second.log"
    with Suite("--workers", "1", env=env) as suite:
        async with second_worker(suite.address("router"), log) as (process, address):
            load = Load(suite.url)
            await until(lambda: workers(suite.url), 2)
            running = asyncio.create_task(load.run())
            try:
                await until(lambda: requests_on(address), 4)
                process.send_signal(signal.SIGTERM)
                code = await asyncio.wait_for(process.wait(), WAIT_S)
                ended = load.outcomes.total()
                await until(lambda: count(load, ended), CLIENTS)  # the other worker has them all
            finally:
                load.stopping = True
                await asyncio.wait_for(running, WAIT_S)
        async with httpx.AsyncClient() as client:
            metrics = (await client.get(f"{suite.url}/metrics", timeout=WAIT_S)).text
    said = await asyncio.to_thread(log.read_text)
    assert code == 0, said
    assert set(load.outcomes) == {"ok"}, load.outcomes
    assert "outlasted" not in said, said
    assert not MIGRATIONS.findall(metrics), "what ran was moved instead of finished"


async def count(load: Load, before: int) -> int:
    return load.outcomes.total() - before


async def workers(url: str) -> int:
    async with httpx.AsyncClient() as client:
        found: int = (await client.get(f"{url}/ready", timeout=WAIT_S)).json()["workers"]
        return found


async def requests_on(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        info = await worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=20)
        return info.load.running_requests


async def until(number: Callable[[], Awaitable[int]], least: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while await number() < least:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
