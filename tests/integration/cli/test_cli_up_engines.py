"""`sluice up --engines` with servers that speak vLLM's and SGLang's HTTP, while the file changes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.hashing import block_hashes
from services.common.net.ports import free_port, free_row
from services.common.packing import unpack_u64
from services.common.rpc.channels import open_channel
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.data.tiny_models import build_tiny_model
from tests.support.fakes.fake_http_engines import BLOCK, FakeServer, FakeSglang, FakeVllm, served

WAIT_S = 60


class Running:
    """A `sluice up --engines` over two servers."""

    def __init__(self, folder: Path, urls: dict[str, str]) -> None:
        self.file = folder / "engines.yaml"
        self.urls = urls
        self.list("first", "second")
        self.port, base = free_port(), free_row(3)
        self.router_address = f"127.0.0.1:{base + 1}"
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(str(Path(sys.executable).with_name("sluice")), "up", "--port", str(self.port)),
                    *("--base-grpc-port", str(base), "--engines", str(self.file)),
                ],
                stdout=log,
                stderr=log,
            )
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=30)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def list(self, *names: str) -> None:
        self.file.write_text("".join(f"- name: {name}\n  url: {self.urls[name]}\n" for name in names))

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                assert self.process.poll() is None, self.log
                await asyncio.sleep(0.05)

    async def until_workers(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                assert self.process.poll() is None, self.log
                try:
                    if (await self.client.get("/ready")).json().get("workers") == count:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)

    async def until_indexed(self, prompt: Sequence[int]) -> None:
        """Waits until the router has no reservation and knows a worker that holds a prompt's blocks."""
        wanted, request = set(block_hashes(prompt, BLOCK)), router_pb2.DumpIndexRequest()
        async with open_channel(self.router_address) as channel, asyncio.timeout(WAIT_S):
            router = router_pb2_grpc.RouterStub(channel)
            while any(load.requests for load in (await router.GetLoads(router_pb2.GetLoadsRequest())).loads):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            while True:
                async for dump in router.DumpIndex(request):
                    if wanted <= set(unpack_u64(dump.block_hashes)):
                        return
                await asyncio.sleep(0.02)

    async def addresses(self) -> dict[str, str]:
        """HTTP addresses of the engines by worker id, as registered at the router."""
        async with open_channel(self.router_address) as channel:
            router = router_pb2_grpc.RouterStub(channel)
            listed = await router.ListWorkers(router_pb2.ListWorkersRequest(), timeout=WAIT_S)
        return {worker.worker_id: f"http://{worker.http_address}" for worker in listed.workers}

    async def complete(self, first: int, length: int) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": list(range(first, first + length)), "max_tokens": 2, "ignore_eos": True}
        response = await self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


@asynccontextmanager
async def running(folder: Path, first: FakeServer, second: FakeServer) -> AsyncIterator[Running]:
    async with served(first) as first_url, served(second) as second_url:
        suite = Running(folder, {"first": first_url, "second": second_url})
        try:
            yield suite
        except BaseException as error:
            error.add_note(suite.log[-4000:])
            raise
        finally:
            await suite.client.aclose()
            suite.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(suite.process.wait, WAIT_S) == 0


@pytest.fixture
async def servers(tmp_path: Path) -> tuple[FakeServer, FakeServer]:
    root = str(build_tiny_model(tmp_path / "tiny"))
    return FakeVllm(root), FakeSglang(root)


async def test_up_with_engines_routes_repeated_prompts_together_and_follows_its_file(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path
) -> None:
    async with running(tmp_path, *servers) as suite:
        await suite.until_workers(2)
        assert await suite.addresses() == suite.urls
        for server in servers:
            server.bodies.clear()
        length = 4 * BLOCK + 3
        for prompt in range(4):
            cached = []
            for _ in range(4):
                usage = (await suite.complete(50 * prompt, length))["usage"]
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
                await suite.until_indexed(range(50 * prompt, 50 * prompt + length))
            assert cached == [0, *[4 * BLOCK] * 3], "the engine's own usage: the first request's blocks were found"
        asked = [sorted({_first(body) for body in server.bodies}) for server in servers]
        assert sorted([*asked[0], *asked[1]]) == [0, 50, 100, 150], "each prompt went to one engine only"

        suite.file.write_text(suite.file.read_text() + "- name: third\n  ulr: http://h:1\n")
        await suite.until(lambda: "engines.yaml:6: ulr is unknown" in suite.log.replace("\n", ""))
        await suite.until_workers(2)

        suite.list("second")
        await suite.until_workers(1)
        servers[0].bodies.clear()
        await suite.complete(0, length)
        assert not servers[0].bodies

        suite.list("first", "second")
        await suite.until_workers(2)


async def test_up_with_an_engine_that_fails_restarts_its_worker(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path
) -> None:
    first, _ = servers
    async with running(tmp_path, *servers) as suite:
        await suite.until_workers(2)
        first.healthy = False
        await suite.until_workers(1)
        await suite.complete(0, BLOCK)
        first.healthy = True
        await suite.until_workers(2)


def test_up_with_an_invalid_file_of_engines_names_line_and_field(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text("- name: a\n  url: nowhere\n")
    command = [str(Path(sys.executable).with_name("sluice")), "up", "--engines", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "engines.yaml:2: url is 'nowhere', expected http://host:port." in done.stderr.replace("\n", "")


def _first(body: dict[str, Any]) -> int:
    """The first token of a generation's prompt."""
    return int((body.get("prompt") or body["input_ids"])[0])
