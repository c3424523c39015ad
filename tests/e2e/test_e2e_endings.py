"""However a request ends, nothing of it stays: clients that leave, workers that die, a thousand chats at once."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import httpx
import psutil
import pytest

from sluice.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.servers.suite import Suite

LONG = {"model": "tekken", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
USER = [{"role": "user", "content": "Go on and on about rivers."}]


@pytest.fixture
def slow() -> Iterator[Suite]:
    """Engine steps of some 6 ms, as on hardware."""
    with Suite("--speedup", "1", env={"SLUICE_GATEWAY_MIGRATION": "false"}) as suite:
        yield suite


async def load(address: str) -> common_pb2.WorkerLoad:
    async with grpc.aio.insecure_channel(address) as channel:
        info = await worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest())
    return info.load


async def busy(suite: Suite) -> int:
    """Requests that some worker runs or holds in its queue."""
    loads = await asyncio.gather(*(load(address) for address in suite.addresses("worker")))
    return sum(one.running_requests + one.waiting_requests for one in loads)


async def reservations(suite: Suite) -> int:
    async with grpc.aio.insecure_channel(suite.address("router")) as channel:
        answer = await router_pb2_grpc.RouterStub(channel).GetLoads(router_pb2.GetLoadsRequest())
    return sum(load.requests for load in answer.loads)


def live_streams(suite: Suite) -> int:
    return gauge(suite, "sluice_gateway_live_streams")


def gauge(suite: Suite, name: str) -> int:
    found = re.search(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", httpx.get(f"{suite.url}/metrics").text, re.MULTILINE)
    assert found, name
    return int(float(found[1]))


async def until(what: str, reached: Callable[[], object], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while True:
        answer = reached()
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer:
            return
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.02)


async def nothing_left(suite: Suite) -> None:
    async def idle() -> bool:
        return live_streams(suite) == 0 and await busy(suite) == 0 and await reservations(suite) == 0

    await until("no stream, request or reservation left", idle)


async def events(response: httpx.Response) -> AsyncIterator[dict[str, object]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


async def test_without_migration_a_worker_that_dies_ends_its_streams_with_an_error_event(slow: Suite) -> None:
    async with httpx.AsyncClient(base_url=slow.url, timeout=30) as client:
        body = {**LONG, "messages": USER}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            seen = []
            async for event in events(response):
                seen.append(event)
                if len(seen) == 5:
                    await _kill_busy_worker(slow)
        assert "error" in seen[-1]
        assert all("error" not in event for event in seen[:-1])
        # `sluice up` sees the death as well and ends the suite; until then nothing hangs.


async def _kill_busy_worker(suite: Suite) -> None:
    for process, address in zip(suite.processes("worker"), suite.addresses("worker"), strict=True):
        if (await load(address)).running_requests:
            process.kill()
            return
    raise AssertionError("no worker was busy")


async def one_chat(client: httpx.AsyncClient, number: int) -> None:
    marker = f"marker{number:05d}"
    body = {
        "model": "tekken",
        "messages": [{"role": "user", "content": f"{marker} please"}],
        "max_tokens": 60,
        "stream": number % 2 == 0,
    }
    text, answer_ids = "", set()
    if body["stream"]:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            async for event in events(response):
                answer_ids.add(event["id"])
                text += event["choices"][0]["delta"].get("content") or ""  # type: ignore[index]
    else:
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer_ids.add(response.json()["id"])
        text = response.json()["choices"][0]["message"]["content"]
    assert len(answer_ids) == 1
    assert marker in text, f"{marker} was answered with {text!r}"


async def test_a_thousand_chats_leave_nothing_behind(suite: Suite) -> None:
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)

    async def chats(first: int, number: int) -> None:
        async with httpx.AsyncClient(base_url=suite.url, timeout=120, limits=limits) as client:
            gate = asyncio.Semaphore(64)

            async def one(index: int) -> None:
                async with gate:
                    await one_chat(client, index)

            await asyncio.gather(*(one(first + index) for index in range(number)))

    await chats(0, 100)  # connections, pools and caches are made now
    await nothing_left(suite)
    tasks = gauge(suite, "sluice_process_tasks")
    files = {process.pid: process.num_fds() for process in suite.processes()}

    await chats(1000, 1000)

    await nothing_left(suite)
    await until("tasks are back", lambda: gauge(suite, "sluice_process_tasks") <= tasks)

    def files_are_back() -> bool:
        return all(psutil.Process(pid).num_fds() <= number for pid, number in files.items())

    await until("file descriptors are back", files_are_back)
