"""`sluice up --engines` as a process, over servers that a test started."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from services.common.base.packing import unpack_u64
from services.common.net.ports import free_port, free_row
from services.common.rpc.channels import open_channel
from services.common.types.hashing import block_hashes
from sluice.v1 import router_pb2, router_pb2_grpc

WAIT_S = 60


class EngineFileSuite:
    """A running suite and its file.

    Args:
        engines: fields of each engine of the file by name, of which `list` writes some; or the whole of another file.
        block: tokens per block.
    """

    def __init__(self, folder: Path, engines: Mapping[str, Mapping[str, str]], block: int) -> None:
        self.file, self._log = folder / "engines.yaml", folder / "log"
        self._engines, self._block = engines, block
        if "kubernetes" in engines:
            self.file.write_text(json.dumps(engines))
        else:
            self.list(*engines)
        self.port, base = free_port(), free_row(3)
        self._router = f"127.0.0.1:{base + 1}"
        command = [str(Path(sys.executable).with_name("sluice")), "up", "--engines", str(self.file)]
        ports = ["--port", str(self.port), "--base-grpc-port", str(base)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*command, *ports], stdout=log, stderr=log)
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=WAIT_S)

    @property
    def log(self) -> str:
        """All output so far."""
        return self._log.read_text()

    def list(self, *names: str) -> None:
        """Replaces the file by one with these engines."""
        self.file.write_text(json.dumps([{"name": name, **self._engines[name]} for name in names], indent=1))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for a condition while the suite runs."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                assert self.process.poll() is None, self.log
                await asyncio.sleep(0.05)

    async def until_workers(self, count: int) -> None:
        """Waits until the gateway is connected to as many workers."""
        async with asyncio.timeout(WAIT_S):
            while True:
                assert self.process.poll() is None, self.log
                try:
                    if (await self.client.get("/ready")).json().get("workers") == count:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)

    async def complete(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        """Returns the answer to a completion of two tokens."""
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 2, "ignore_eos": True, **more}
        response = await self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def cached_tokens(self, prompt: Sequence[int]) -> int:
        """Completes a prompt; returns its cached tokens once its blocks are indexed and its reservation has ended."""
        usage = (await self.complete(prompt))["usage"]
        await self.until_index(prompt, held=True)
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    async def until_index(self, prompt: Sequence[int], *, held: bool, wait_s: float = WAIT_S) -> None:
        """Waits until the router has no reservation, and a worker that holds a prompt's blocks or none of them."""
        wanted = set(block_hashes(prompt, self._block))
        async with open_channel(self._router) as channel, asyncio.timeout(wait_s):
            router = router_pb2_grpc.RouterStub(channel)
            while True:
                loads = (await router.GetLoads(router_pb2.GetLoadsRequest(), wait_for_ready=True)).loads
                dump = router.DumpIndex(router_pb2.DumpIndexRequest(), wait_for_ready=True)
                dumps = [set(unpack_u64(one.block_hashes)) async for one in dump]
                found = any(wanted <= dump for dump in dumps) if held else not any(wanted & dump for dump in dumps)
                if found and not any(load.requests for load in loads):
                    return
                await asyncio.sleep(0.02)

    async def workers(self) -> dict[str, router_pb2.WorkerInfo]:
        """The workers as registered at the router, by id."""
        async with open_channel(self._router) as channel:
            router = router_pb2_grpc.RouterStub(channel)
            listed = await router.ListWorkers(router_pb2.ListWorkersRequest(), timeout=WAIT_S, wait_for_ready=True)
        return {worker.worker_id: worker for worker in listed.workers}


@asynccontextmanager
async def up_with_engines(
    folder: Path, engines: Mapping[str, Mapping[str, str]], block: int
) -> AsyncIterator[EngineFileSuite]:
    """Runs the suite; it must end with exit code 0."""
    suite = EngineFileSuite(folder, engines, block)
    try:
        yield suite
    except BaseException as error:
        error.add_note(suite.log[-4_000:])
        raise
    finally:
        await suite.client.aclose()
        suite.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(suite.process.wait, WAIT_S) == 0
