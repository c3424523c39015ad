"""What both engines that stand for vLLM are held to beside the common suite."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from services.common.base.packing import pack_u32, unpack_u64
from services.common.types.hashing import block_hashes
from sluice.v1 import router_pb2, worker_pb2
from tests.engines import engine_suite as suite
from tests.support.servers.router_child import RouterChild, router_children

BLOCK = 32
WAIT_S = 60

NOT_COMPILED: tuple[dict[str, Any], ...] = (
    {"json": {"type": "object", "patternProperties": {"^(": {}}}},
    {"grammar": 'root ::= "a" | '},
)
"""Constraints that vLLM's validation accepts and its compiler refuses."""


async def events_reach_the_router_and_routing_follows(engine: suite.EngineUnderTest, folder: Path) -> None:
    """A router knows the prompt's blocks by our own hashes, and a cleared cache is known as well."""
    async with router_children(1, folder) as (router,):  # noqa: SIM117
        async with suite.running(engine, "--routers", f"127.0.0.1:{router.port}") as worker:
            prompt = suite.prompts(1, 3 * BLOCK + 5, 3 * BLOCK + 5, seed=77)[0]
            answer = await suite.generate(worker, suite.request("routed", prompt, 40))
            # The last token's own keys and values are never computed.
            held = set(block_hashes([*prompt, *answer.token_ids[:-1]], BLOCK))
            await _until_index_has(router, held)
            overlap = await _overlap(router, prompt)
            assert (overlap.overlap.device_blocks, overlap.tokens_to_compute) == (3, 5)
            await _a_tenants_blocks_are_not_anybodys(router, worker, prompt)
            clear = worker_pb2.ControlRequest(action=worker_pb2.ControlRequest.ACTION_CLEAR_CACHE)
            await worker.stub.Control(clear, timeout=suite.CALL_S)
            await _until_index_is_empty(router)
            again = await suite.generate(worker, suite.request("again", prompt, 1))
            assert again.cached_tokens == 0
            await _until_index_has(router, set(block_hashes(prompt, BLOCK)))


async def _a_tenants_blocks_are_not_anybodys(
    router: RouterChild, worker: suite.RunningWorker, prompt: list[int]
) -> None:
    if "cache_salt" not in await worker.claims():
        return
    salted = await suite.generate(worker, suite.request("salted", prompt, 1, cache_salt="tenant-a"))
    assert salted.cached_tokens == 0
    await _until_index_has(router, set(block_hashes(prompt, BLOCK, cache_salt="tenant-a")))


async def _overlap(router: RouterChild, prompt: list[int]) -> router_pb2.RouteQueryResponse:
    query = router_pb2.RouteQueryRequest(model="tiny", prompt=router_pb2.PromptRef(token_ids=pack_u32(prompt)))
    return await router.stub.RouteQuery(query, timeout=suite.CALL_S)


async def _indexed(router: RouterChild) -> set[int]:
    return {block_hash for row in await router.dump() for block_hash in unpack_u64(row[5])}


async def _until_index_has(router: RouterChild, expected: set[int]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not expected <= (found := await _indexed(router)):
        assert time.monotonic() < deadline, f"{len(expected - found)} of {len(expected)} blocks are not there"
        await asyncio.sleep(0.1)


async def _until_index_is_empty(router: RouterChild) -> None:
    deadline = time.monotonic() + WAIT_S
    while found := await _indexed(router):
        assert time.monotonic() < deadline, f"{len(found)} blocks are still there"
        await asyncio.sleep(0.1)
