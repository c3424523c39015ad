"""Processes that hang, disappear or are told to stop: clients hear the answer, a mark, or a typed error in time."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from sluice.v1 import worker_pb2, worker_pb2_grpc
from tests.support.clients.chat_answers import whole
from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.loose_suite import LooseSuite

WAIT_S = 120
TWO_LIVE = r"^sluice_gateway_live_streams(?:\{.*\})? 2\.0$"


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LooseSuite]:
    model = build_tiny_model(tmp_path_factory.mktemp("hangs") / "tiny")
    worker_flags = ("--engine-args", "timing=fixed,fixed_step_ms=20", "--canary-s", "0")
    gateway_flags = ("--token-timeout-s", "5", "--drain-s", "6")
    with LooseSuite(model, postprocess=1, worker_flags=worker_flags, gateway_flags=gateway_flags) as running:
        yield running


def body(number: int, tokens: int = 60) -> dict[str, Any]:
    said = f"Tell me of number {number}."
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": said}],
        "seed": 3,
        "max_tokens": tokens,
        "ignore_eos": True,
    }


async def inject(suite: LooseSuite, worker: str, fault: str) -> None:
    async with grpc.aio.insecure_channel(suite.address(worker)) as channel:
        request = worker_pb2.ControlRequest(
            action=worker_pb2.ControlRequest.ACTION_INJECT_FAULT, arguments={"fault": fault}
        )
        await worker_pb2_grpc.WorkerStub(channel).Control(request)


async def test_an_engine_that_hangs_in_a_healthy_process_is_left(suite: LooseSuite) -> None:
    numbers = range(8)
    async with httpx.AsyncClient(base_url=suite.url, timeout=WAIT_S) as client:
        told = await asyncio.gather(*(whole(client, body(number)) for number in numbers))
        asked = [asyncio.create_task(whole(client, body(number))) for number in numbers]
        await asyncio.sleep(0.4)
        await inject(suite, "worker-0", "hang")
        asked += [asyncio.create_task(whole(client, body(number))) for number in numbers]
        heard = await asyncio.gather(*asked)
        await inject(suite, "worker-0", "none")
    assert [answer.same for answer in heard] == [answer.same for answer in told] * 2
    assert sum(answer.choice.get("migrations", 0) for answer in heard) > 0


async def test_without_a_router_answers_say_so_and_with_it_again_they_do_not(suite: LooseSuite) -> None:
    async with httpx.AsyncClient(base_url=suite.url, timeout=WAIT_S) as client:
        suite.end("router", signal.SIGKILL)
        answers = [await client.post("/v1/chat/completions", json=body(number, 5)) for number in range(4)]
        assert {answer.status_code for answer in answers} == {200}
        assert answers[-1].headers["x-sluice-degraded"] == "router_unavailable"
        assert answers[-1].json()["choices"][0]["degraded"] == ["router_unavailable"]
        suite.start("router")
        async with asyncio.timeout(WAIT_S):
            while answers[-1].headers.get("x-sluice-degraded"):
                answers.append(await client.post("/v1/chat/completions", json=body(1, 5)))
                await asyncio.sleep(0.05)
        assert {answer.status_code for answer in answers} == {200}, "a router that was started anew knows no workers"


async def test_a_stage_that_hangs_takes_its_share_of_the_time_and_no_more(suite: LooseSuite) -> None:
    async with httpx.AsyncClient(base_url=suite.url, timeout=WAIT_S) as client:
        suite.end("preprocess", signal.SIGSTOP)
        try:
            headers = {"x-request-timeout-ms": "2000"}
            answer = await client.post("/v1/chat/completions", json=body(1, 5), headers=headers)
        finally:
            suite.end("preprocess", signal.SIGCONT)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] in ("stage_timeout", "request_timeout")
        async with asyncio.timeout(WAIT_S):
            while (await client.post("/v1/chat/completions", json=body(1, 5))).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.2)


async def test_a_stop_lets_streams_finish_in_time_ends_the_others_in_words_and_takes_no_more(suite: LooseSuite) -> None:
    asked = {**body(1, 2000), "stream": True}
    async with (
        httpx.AsyncClient(base_url=suite.url, timeout=WAIT_S) as client,
        client.stream("POST", "/v1/chat/completions", json=asked) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        short = asyncio.create_task(whole(client, body(2, 60)))
        async with asyncio.timeout(WAIT_S):
            while not re.search(TWO_LIVE, (await client.get("/metrics")).text, re.MULTILINE):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        suite.end("gateway", signal.SIGTERM)
        answer = await short
        assert answer.tokens == 60
        deadline = time.monotonic() + WAIT_S
        while True:  # the listener closes a moment after the signal
            assert time.monotonic() < deadline
            try:
                async with httpx.AsyncClient(base_url=suite.url, timeout=WAIT_S) as late:
                    await late.get("/ready")
            except httpx.ConnectError:
                break
            except httpx.TransportError:
                continue  # it was let go of while the server was closing
        events = [line.removeprefix("data: ") async for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "shutting_down"
    assert suite.ended("gateway") == 0
