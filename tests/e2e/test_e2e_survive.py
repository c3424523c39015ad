"""Processes are killed with kill -9 under load: every client gets the answer it would have got."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import httpx
import pytest

from sluice.v1 import router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.clients.chat_answers import Answer, streamed, whole
from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.loose_suite import LooseSuite
from tests.support.waiting import until

WAIT_S = 120
STREAMS = 100
CALLS = (
    "<think>It wants the weather in München 🌦.</think>Let me look."
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "München", "days": [1, 2, 3]}}\n</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LooseSuite]:
    model = build_tiny_model(tmp_path_factory.mktemp("survive") / "tiny")
    # Slow enough to be at work still when it happens.
    slow = ("--engine-args", "timing=fixed,fixed_step_ms=25", "--drain-s", "1")
    with LooseSuite(model, worker_flags=slow) as running:
        yield running


def body(number: int) -> dict[str, Any]:
    more: dict[str, Any]
    if number % 5 == 0:
        said, more = f"Number {number}: <<<script: {CALLS}>>>", {"tools": TOOLS}
    else:
        said, more = f"Tell me of number {number}.", {"max_tokens": 40 + number % 30}
        if number % 10 == 1:  # still at work when it happens, even where this process is slow to read the answers
            more = {"max_tokens": 300, "ignore_eos": True}
    return {"model": "tiny", "messages": [{"role": "user", "content": said}], "seed": number, **more}


async def disturbed(
    suite: LooseSuite, numbers: range, victim: str, how: signal.Signals = signal.SIGKILL
) -> list[Answer]:
    """The streams' answers, while a process is signalled as soon as half of them have begun."""
    begun: set[int] = set()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=suite.url, timeout=WAIT_S, limits=limits) as client:
        asked = [asyncio.create_task(streamed(client, body(number), partial(begun.add, number))) for number in numbers]
        await until(lambda: len(begun) >= len(numbers) // 2, WAIT_S)
        suite.end(victim, how)
        try:
            return await asyncio.gather(*asked)
        finally:
            await restarted(suite, victim)


async def restarted(suite: LooseSuite, victim: str) -> None:
    """Starts the victim again, also when a test fails: the next one needs it."""
    await asyncio.to_thread(suite.start, victim)
    await asyncio.to_thread(suite.wait_ready, len(suite.workers))


_undisturbed: list[Answer] = []


async def undisturbed(suite: LooseSuite, numbers: range) -> list[Answer]:
    """Returns the answers of an undisturbed suite; they are asked for once."""
    if not _undisturbed:
        _undisturbed.extend(await _whole(suite, numbers))
    return _undisturbed


async def _whole(suite: LooseSuite, numbers: range) -> list[Answer]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=suite.url, timeout=WAIT_S, limits=limits) as client:
        return await asyncio.gather(*(whole(client, body(number)) for number in numbers))


async def test_a_killed_postprocess_replica_under_100_streams(suite: LooseSuite) -> None:
    numbers = range(STREAMS)
    told = await undisturbed(suite, numbers)
    heard = await disturbed(suite, numbers, "postprocess-0")
    assert [answer.same for answer in heard] == [answer.same for answer in told]
    marked = sum("postprocess_replaced" in answer.choice.get("degraded", ()) for answer in heard)
    assert marked > 0, "nothing was disturbed"
    assert {answer.finish_reason for answer in heard} >= {"tool_calls", "length"}
    await nothing_is_left(suite)


async def test_a_drained_postprocess_replica_hands_its_streams_over(suite: LooseSuite) -> None:
    numbers = range(STREAMS)
    told = await undisturbed(suite, numbers)
    before = await moves(suite)
    heard = await disturbed(suite, numbers, "postprocess-0", signal.SIGTERM)
    assert [answer.same for answer in heard] == [answer.same for answer in told]
    assert not any(answer.choice.get("degraded") for answer in heard), "no answer is degraded"
    after = await moves(suite)
    assert after["drained"] > before["drained"], "nothing outlasted the notice"
    assert after["lost"] == before["lost"], "nothing was cut"
    await nothing_is_left(suite)


async def moves(suite: LooseSuite) -> dict[str, float]:
    """Streams taken up by another postprocess replica so far, by cause."""
    async with httpx.AsyncClient(base_url=suite.url) as client:
        metrics = (await client.get("/metrics")).text
    line = r'^sluice_gateway_text_moves_total\{[^}]*cause="(\w+)"[^}]*\} (\S+)$'
    return {"drained": 0.0, "lost": 0.0} | {
        cause: float(count) for cause, count in re.findall(line, metrics, re.MULTILINE)
    }


async def test_a_killed_worker_under_load(suite: LooseSuite) -> None:
    numbers = range(STREAMS)
    told = await undisturbed(suite, numbers)
    heard = await disturbed(suite, numbers, "worker-0")
    assert [answer.same for answer in heard] == [answer.same for answer in told]
    assert sum(answer.choice.get("migrations", 0) for answer in heard) > 0, "nothing was disturbed"
    await nothing_is_left(suite)


async def test_a_drained_worker_hands_over_what_outlasts_its_drain(suite: LooseSuite) -> None:
    async with httpx.AsyncClient(base_url=suite.url, timeout=WAIT_S) as client:
        asked = {**body(1), "max_tokens": 600, "ignore_eos": True}
        running = [asyncio.create_task(client.post("/v1/chat/completions", json=asked)) for _ in range(8)]
        async with asyncio.timeout(WAIT_S):
            while not await at_work(suite, "worker-1"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        suite.end("worker-1", signal.SIGTERM)
        try:
            answers = await asyncio.gather(*running)
        finally:
            await restarted(suite, "worker-1")
    assert {answer.status_code for answer in answers} == {200}
    texts = {answer.json()["choices"][0]["message"]["content"] for answer in answers}
    assert len(texts) == 1, "moved or not, they say the same"
    moved = [answer for answer in answers if "x-sluice-migrations" in answer.headers]
    assert moved, "nothing outlasted the drain"
    assert moved[0].headers["x-sluice-migrations"] == str(moved[0].json()["choices"][0]["migrations"])


async def test_a_request_whose_time_is_up_stops_everywhere(suite: LooseSuite) -> None:
    async with httpx.AsyncClient(base_url=suite.url, timeout=WAIT_S) as client:
        for headers in ({"x-request-timeout-ms": "3000"}, {"grpc-timeout": "3S"}):
            long = {**body(1), "max_tokens": 3000, "ignore_eos": True}
            answer = await client.post("/v1/chat/completions", json=long, headers=headers)
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "request_timeout"
        for headers in ({"x-request-timeout-ms": "soon"}, {"grpc-timeout": "5"}, {"x-request-timeout-ms": "0"}):
            answer = await client.post("/v1/chat/completions", json=body(1), headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == next(iter(headers))
    await nothing_is_left(suite)


async def nothing_is_left(suite: LooseSuite) -> None:
    """No stream, no reservation and no running request stays anywhere."""
    left: dict[str, float] = {}
    async with asyncio.timeout(30), httpx.AsyncClient(base_url=suite.url) as client:
        while True:
            left = await _left(suite, client)
            if not any(left.values()):
                return
            await asyncio.sleep(0.1)


async def _left(suite: LooseSuite, client: httpx.AsyncClient) -> dict[str, float]:
    metrics = (await client.get("/metrics")).text
    found = re.search(r"^sluice_gateway_live_streams(?:\{[^}]*\})? (\S+)$", metrics, re.MULTILINE)
    left = {"streams": float(found[1]) if found else -1.0}
    async with grpc.aio.insecure_channel(suite.address("router")) as channel:
        loads = await router_pb2_grpc.RouterStub(channel).GetLoads(router_pb2.GetLoadsRequest())
        left["reservations"] = sum(load.requests for load in loads.loads)
    for name in suite.workers:
        left[name] = await at_work(suite, name)
    return left


async def at_work(suite: LooseSuite, name: str) -> int:
    """Requests that a worker has."""
    async with grpc.aio.insecure_channel(suite.address(name)) as channel:
        info = await worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=20)
        return info.load.running_requests + info.load.waiting_requests
