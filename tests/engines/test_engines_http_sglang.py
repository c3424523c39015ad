"""The http engine: SGLang's own server on the CPU, registered by a file of `sluice up --engines`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from services.common.net.ports import free_port
from tests.engines import engine_suite as suite
from tests.support.data.tiny_models import build_servable
from tests.support.servers.engine_file_suite import up_with_engines

pytestmark = pytest.mark.engines

PAGE = 16
START_S = 400
PROMPTS = [[(7 * number + place) % 400 + 10 for place in range(6 * PAGE + 5)] for number in range(4)]


@asynccontextmanager
async def sglang_server(model: Path) -> AsyncIterator[dict[str, str]]:
    """Runs a server until the end of the context; yields its fields of the file."""
    port, events, replay = (free_port() for _ in range(3))
    published = {
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{events}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
    }
    process = await asyncio.create_subprocess_exec(
        *(suite.interpreter("sglang"), "-P", str(suite.ROOT / "tests/engines/serve_sglang.py")),
        *("--model-path", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--disable-overlap-schedule", "--disable-cuda-graph", "--max-total-tokens", "8192"),
        *("--page-size", str(PAGE), "--kv-events-config", json.dumps(published)),
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient() as client, asyncio.timeout(START_S):
            while True:
                assert process.returncode is None, "SGLang's server has ended"
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"{url}/health_generate", timeout=30)).status_code == 200:
                        break
                await asyncio.sleep(1)
        yield {"url": url, "kv_events": published["endpoint"], "kv_replay": published["replay_endpoint"]}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def test_plain_sglang_servers_in_a_file_are_routed_by_prefix(tmp_path: Path) -> None:
    model = build_servable(tmp_path / "models").model
    async with AsyncExitStack() as stack:
        engines = {name: await stack.enter_async_context(sglang_server(model)) for name in ("first", "second")}
        up = await stack.enter_async_context(up_with_engines(tmp_path, engines, PAGE))
        await up.until_workers(2)
        workers = await up.workers()
        assert {worker.engine for worker in workers.values()} == {"sglang-http"}
        assert all("kv_events" in worker.card.capabilities for worker in workers.values())
        for prompt in PROMPTS:
            cached = [await up.cached_tokens(prompt) for _ in range(3)]
            assert cached == [0, 6 * PAGE, 6 * PAGE], "repeats land where the prefix is, as SGLang's usage confirms"
        up.list("first")
        await up.until_workers(1)
        async with httpx.AsyncClient(timeout=60) as client:
            (await client.post(f"{engines['first']['url']}/flush_cache")).raise_for_status()
        assert await up.cached_tokens(PROMPTS[0]) == 0
