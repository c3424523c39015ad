"""An engine behind the whole suite, spoken to over HTTP: each service and each worker is a process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from services.common.base.packing import unpack_u64
from services.common.rpc.channels import open_channel
from services.common.types.hashing import block_hashes
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.engines import engine_suite as suite
from tests.support.servers.loose_suite import LooseSuite

WAIT_S = 60
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class ServedModel:
    """A running suite.

    Attributes:
        workers: by worker id.
    """

    engine: suite.EngineUnderTest
    client: httpx.AsyncClient
    router: router_pb2_grpc.RouterAsyncStub
    workers: dict[str, suite.RunningWorker]

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """A whole answer, which must be a 200."""
        answer = await self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        return said

    async def complete(self, prompt: str | Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """A greedy completion with its token ids."""
        body = {**GREEDY, "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, **more}
        return await self.post("/v1/completions", **body)

    async def idle(self) -> None:
        """Waits until no worker runs anything or holds a block, and the router has no reservation."""
        for worker in self.workers.values():
            await worker.idle(WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while await self._reserved():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def _reserved(self) -> int:
        answer = await self.router.GetLoads(router_pb2.GetLoadsRequest(), timeout=WAIT_S)
        return sum(load.requests for load in answer.loads)

    async def known(self) -> set[str]:
        """Ids of the workers that the router knows."""
        listed = await self.router.ListWorkers(router_pb2.ListWorkersRequest(), timeout=WAIT_S)
        return {worker.worker_id for worker in listed.workers}

    async def holders(self, prompt: Sequence[int], block_size: int) -> set[str]:
        """Workers that hold all full blocks of a prompt, as the router knows it."""
        wanted, held = set(block_hashes(prompt, block_size)), dict[str, set[int]]()
        async for dump in self.router.DumpIndex(router_pb2.DumpIndexRequest(), timeout=WAIT_S):
            held.setdefault(dump.worker_id, set()).update(unpack_u64(dump.block_hashes))
        return {worker_id for worker_id, hashes in held.items() if wanted <= hashes}

    async def until_held(self, prompt: Sequence[int], block_size: int) -> str:
        """The one worker that holds a prompt, once the router knows of it."""
        deadline = time.monotonic() + WAIT_S
        while not (found := await self.holders(prompt, block_size)):
            assert time.monotonic() < deadline, "the router never heard of these blocks"
            await asyncio.sleep(0.05)
        (holder,) = found
        return holder


@asynccontextmanager
async def served(
    engine: suite.EngineUnderTest, workers: Mapping[str, Sequence[str]], *gateway_flags: str
) -> AsyncIterator[ServedModel]:
    """The suite with workers of an engine; everything has ended when it is left.

    Args:
        workers: flags of each, by worker id.
    """
    async with AsyncExitStack() as stack:
        loose = stack.enter_context(_others(engine, gateway_flags))
        join = ("--routers", loose.address("router"))
        async with asyncio.TaskGroup() as group:
            starting = {
                name: group.create_task(
                    stack.enter_async_context(suite.running(engine, "--worker-id", name, *join, *flags))
                )
                for name, flags in workers.items()
            }
        await asyncio.to_thread(loose.wait_ready, len(workers))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=loose.url, timeout=suite.CALL_S))
        channel = await stack.enter_async_context(open_channel(loose.address("router")))
        started = {name: task.result() for name, task in starting.items()}
        yield ServedModel(engine, client, router_pb2_grpc.RouterStub(channel), started)


@contextmanager
def _others(engine: suite.EngineUnderTest, gateway_flags: tuple[str, ...]) -> Iterator[LooseSuite]:
    """Everything but the workers."""
    loose = LooseSuite(engine.model, workers=0, postprocess=1, gateway_flags=gateway_flags)
    try:
        for name in loose.ports:
            loose.start(name)
        yield loose
    finally:
        loose.close()
