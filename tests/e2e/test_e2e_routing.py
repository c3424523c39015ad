"""Requests that share a prefix meet; others spread; what one router learned, another uses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence

import grpc
import httpx
import pytest

from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.suite import Suite


def long_prompt(topic: str) -> str:
    """About 2,000 tokens."""
    return " ".join(f"Chapter {number} of the book about {topic} tells more." for number in range(180))


def ask(url: str, prompt: str) -> dict[str, int]:
    """prompt and cached tokens of one completion."""
    answer = httpx.post(
        f"{url}/v1/completions", json={"model": "tekken", "prompt": prompt, "max_tokens": 4}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return {"prompt": usage["prompt_tokens"], "cached": usage["prompt_tokens_details"]["cached_tokens"]}


async def blocks_by_worker(address: str) -> dict[str, int]:
    async with grpc.aio.insecure_channel(address) as channel:
        dumped: dict[str, int] = {}
        async for dump in router_pb2_grpc.RouterStub(channel).DumpIndex(router_pb2.DumpIndexRequest()):
            dumped[dump.worker_id] = dumped.get(dump.worker_id, 0) + len(dump.block_hashes) // 8
    return dumped


async def until_indexed(address: str, workers: int, at_least: int) -> dict[str, int]:
    """Waits until `workers` workers hold at least that many blocks each in this router's view."""
    deadline = asyncio.get_running_loop().time() + 60
    while True:
        dumped = await blocks_by_worker(address)
        if sum(count >= at_least for count in dumped.values()) >= workers:
            return dumped
        assert asyncio.get_running_loop().time() < deadline, f"index of {address}: {dumped}"
        await asyncio.sleep(0.05)


async def until_they_agree(routers: Sequence[str], workers: int, at_least: int) -> None:
    """Waits until every router holds as much, and the same."""
    async with asyncio.timeout(60):
        while True:
            dumps = [await until_indexed(router, workers, at_least) for router in routers]
            if all(dump == dumps[0] for dump in dumps):
                return
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def replicated(shared_redis: RedisServer) -> Iterator[Suite]:
    """Two routers on one Redis."""
    with Suite("--speedup", "20", "--redis", shared_redis.url, "--routers", "2") as suite:
        yield suite


async def test_prefixes_meet_at_every_router_and_others_go_elsewhere(replicated: Suite) -> None:
    routers = replicated.addresses("router")
    assert len(routers) == 2
    first = ask(replicated.url, long_prompt("canals") + " And now?")
    assert first["prompt"] > 1900
    assert first["cached"] == 0
    await until_they_agree(routers, 1, first["prompt"] // 16 - 1)
    # Each router alone finds the worker that holds the prefix.
    answers = [ask(replicated.url, long_prompt("canals") + f" Question {number}?") for number in range(6)]
    assert all(answer["cached"] >= first["prompt"] - 3 * 16 for answer in answers)
    dumped = await until_indexed(routers[0], 1, first["prompt"] // 16 - 1)
    assert sum(count > 10 for count in dumped.values()) == 1, "all requests ran on one worker"
    other = ask(replicated.url, long_prompt("mountains"))
    assert other["cached"] < 100
    await until_they_agree(routers, 2, other["prompt"] // 16 - 8)


async def test_a_restarted_router_has_its_index_back(replicated: Suite, shared_redis: RedisServer) -> None:
    prompt = ask(replicated.url, long_prompt("harbours"))["prompt"]
    await until_they_agree(replicated.addresses("router"), 1, prompt // 16 - 1)
    await asyncio.sleep(1)  # the last of its blocks
    before = await blocks_by_worker(replicated.address("router"))
    assert await _router_alone(shared_redis, before) == before


async def _router_alone(redis: RedisServer, expected: dict[str, int]) -> dict[str, int]:
    """Starts another router on the same Redis, which no worker is attached to, and reads its index."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.router",
        "--listen",
        "127.0.0.1:0",
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "SLUICE_ROUTER_REDIS_URL": redis.url, "SLUICE_ROUTER_LOG_FORMAT": "json"},
    )
    try:
        address = await asyncio.wait_for(_listen_address(process), 120)
        deadline = asyncio.get_running_loop().time() + 60
        dumped: dict[str, int] = {}
        while dumped != expected and asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(grpc.aio.AioRpcError):  # it is loading its view
                dumped = await blocks_by_worker(address)
            await asyncio.sleep(0.05)
        return dumped
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 15)


async def _listen_address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    while line := await process.stderr.readline():
        said = json.loads(line)
        if "address" in said and "listens" in said["message"]:
            return str(said["address"])
    raise AssertionError("the router did not say where it listens")
