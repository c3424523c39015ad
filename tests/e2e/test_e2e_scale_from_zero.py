"""A model without workers: requests wait in the router's queue until the first worker has registered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import httpx

from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.loose_suite import LooseSuite
from tests.support.waiting import until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


async def test_requests_wait_for_the_first_worker_of_their_model(tmp_path: Path) -> None:
    suite = LooseSuite(build_tiny_model(tmp_path / "tiny"), workers=1, gateway_flags=("--wait-for-workers-ms", "60000"))
    with suite:
        suite.end("worker-0")
        suite.ended("worker-0")
        async with (
            httpx.AsyncClient(base_url=suite.url, timeout=90) as client,
            grpc.aio.insecure_channel(suite.address("router")) as channel,
        ):
            router = router_pb2_grpc.RouterStub(channel)

            async def gone() -> bool:
                return not (await router.ListWorkers(router_pb2.ListWorkersRequest())).workers

            await until(gone)
            asked = [asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for _ in range(4)]

            async def waits() -> bool:
                queues = (await router.GetQueues(router_pb2.GetQueuesRequest())).queues
                return [(each.model, each.requests) for each in queues] == [("tiny", 4)]

            await until(waits)
            suite.start("worker-0")
            answers = await asyncio.gather(*asked)
            assert [answer.status_code for answer in answers] == [200] * 4
            unknown = await client.post("/v1/chat/completions", json={**CHAT, "model": "unknown"})
            assert unknown.status_code == 404
