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
from tests.engines.event_proxy import EventProxy, cut_events_leave_no_stale_block, repeats_land_together
from tests.support.data.tiny_models import build_servable
from tests.support.servers.engine_file_suite import up_with_engines

pytestmark = pytest.mark.engines

PAGE = 16
START_S = 400
PROMPTS = 4


@asynccontextmanager
async def sglang_server(model: Path) -> AsyncIterator[dict[str, str]]:
    """Runs a server until the end of the context; yields its fields of the file."""
    port, events, replay = (free_port() for _ in range(3))
    published = {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",  # with another host it would connect instead of listening
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
        running = await asyncio.gather(*(stack.enter_async_context(sglang_server(model)) for _ in range(2)))
        servers = dict(zip(("first", "second"), running, strict=True))
        proxies = {name: EventProxy(int(one["kv_events"].rpartition(":")[2])) for name, one in servers.items()}
        forwarding = {name: await stack.enter_async_context(AsyncExitStack()) for name in servers}
        for name, proxy in proxies.items():
            await forwarding[name].enter_async_context(proxy.forwarding())
        engines = {name: {**one, "kv_events": proxies[name].endpoint} for name, one in servers.items()}
        del engines["second"]["kv_replay"]
        up = await stack.enter_async_context(up_with_engines(tmp_path, engines, PAGE))
        await up.until_workers(2)
        workers = await up.workers()
        assert {worker.engine for worker in workers.values()} == {"sglang-http"}
        assert all("kv_events" in worker.card.capabilities for worker in workers.values())
        await repeats_land_together(up, PAGE, PROMPTS, start=0)
        for name, server in servers.items():  # one that replays missed events, and one that does not
            up.list(name)
            await up.until_workers(1)
            clear = f"{server['url']}/flush_cache"
            await cut_events_leave_no_stale_block(
                up, clear, PAGE, proxies[name], forwarding[name], replays="kv_replay" in engines[name]
            )
            up.list(*servers)
            await up.until_workers(2)
        await repeats_land_together(up, PAGE, PROMPTS, start=200)
