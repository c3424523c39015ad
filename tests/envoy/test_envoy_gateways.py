"""A real Envoy in front of gateways: the picker chooses worker and gateway, and the gateway runs what it chose."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path

import grpc
import httpx
import pytest

from services.common.net.ports import free_port
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.servers.envoy import Envoy
from tests.support.servers.suite import Suite

pytestmark = pytest.mark.envoy


async def test_streamed_chats_through_envoy_run_on_the_booked_workers(tmp_path: Path) -> None:
    port, picker = free_port(), f"127.0.0.1:{free_port()}"
    env = {"SLUICE_ROUTER_PICKER_LISTEN": picker, "SLUICE_ROUTER_PICKER_GATEWAYS": f"127.0.0.1:{port}"}
    flags = ("--workers", "3", "--routing", "direct", "--no-migration", "--speedup", "50", "--port", str(port))
    with Suite(*flags, env=env) as suite:
        envoy = Envoy(tmp_path, [picker], [f"127.0.0.1:{port}"])
        await asyncio.to_thread(envoy.start)
        try:
            await _chats(envoy.url, suite)
        finally:
            await asyncio.to_thread(envoy.stop)


async def _chats(url: str, suite: Suite) -> None:
    rng, gate = random.Random(3), asyncio.Semaphore(16)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def chat(number: int) -> tuple[str, str]:
            """Returns the worker that ran it and what it answered."""
            words = f"{number} " + "river " * int(20 * 400 ** rng.random())
            body = {
                "model": "tekken",
                "messages": [{"role": "user", "content": words}],
                "max_tokens": 8,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            headers = {"x-sluice-receipt": "true", "x-sluice-worker": "worker-of-the-client"}
            async with gate, client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status_code == 200, await answer.aread()
                lines = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]
                (receipt,) = json.loads(answer.headers["x-sluice-route-receipt"])
            assert lines[-1] == "[DONE]"
            assert json.loads(lines[-2])["usage"]["completion_tokens"] == 8
            return receipt["worker"], receipt["reason"]

        answers = await asyncio.gather(*(chat(number) for number in range(200)))
    assert {worker for worker, _ in answers} == {"worker-0", "worker-1", "worker-2"}
    assert {reason for _, reason in answers} == {"named_by_request"}, "the client's own hint does not count"
    with grpc.insecure_channel(suite.address("router")) as channel:
        router = router_pb2_grpc.RouterStub(channel)
        deadline = time.monotonic() + 20
        while any(load.requests for load in router.GetLoads(router_pb2.GetLoadsRequest(), timeout=20).loads):
            assert time.monotonic() < deadline, "requests stay booked"
            await asyncio.sleep(0.1)
        decisions = router.GetDecisions(router_pb2.GetDecisionsRequest(limit=200), timeout=20).decisions
    assert len(decisions) == 200
    assert all(each.output_tokens == 8 for each in decisions), "the picker has read the usage of each answer"
