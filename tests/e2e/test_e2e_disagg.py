"""`sluice up --prefill-workers`: requests shared by two workers, over the real router, with real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.servers.loose_suite import LooseSuite
from tests.support.servers.suite import Suite


@pytest.fixture(scope="module")
def pairs() -> Iterator[Suite]:
    with Suite("--prefill-workers", "2", "--workers", "2", "--speedup", "20") as running:
        yield running


def complete(
    suite: Suite | LooseSuite, prompt: str, headers: dict[str, str] | None = None, **more: Any
) -> httpx.Response:
    model = "tekken" if isinstance(suite, Suite) else "tiny"
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "seed": 7, **more}
    return httpx.post(f"{suite.url}/v1/completions", json=body, headers=headers or {}, timeout=60)


async def decisions(suite: Suite) -> list[router_pb2.Decision]:
    """The router's, oldest first."""
    async with grpc.aio.insecure_channel(suite.address("router")) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        answer = await stub.GetDecisions(router_pb2.GetDecisionsRequest())
        return list(reversed(answer.decisions))


async def booked(suite: Suite) -> int:
    async with grpc.aio.insecure_channel(suite.address("router")) as channel:
        loads = await router_pb2_grpc.RouterStub(channel).GetLoads(router_pb2.GetLoadsRequest())
        return sum(load.requests for load in loads.loads)


async def test_growing_prompts_go_to_one_prefill_worker_that_does_not_decode(pairs: Suite) -> None:
    before = len(await decisions(pairs))
    chapter = " ".join(f"Chapter {number} tells of rivers and of gates." for number in range(40))
    for length in range(1, 5):
        assert complete(pairs, " ".join([chapter] * length)).status_code == 200
        await asyncio.sleep(0.3)  # what was cached is reported
    made = (await decisions(pairs))[before:]
    assert len(made) == 4
    assert len({one.prefill.worker_id for one in made}) == 1
    assert made[0].prefill.worker_id.startswith("prefill-")
    assert all(one.decode.worker_id.startswith("worker-") for one in made)


async def test_text_usage_and_logprobs_are_those_of_one_worker(pairs: Suite) -> None:
    fields: list[dict[str, Any]] = [{}, {"logprobs": 2, "echo": True}, {"n": 2}, {"max_tokens": 1}, {"stop": " the"}]
    for number, more in enumerate(fields):
        prompt = f"Number {number} tells of mills."
        shared = complete(pairs, prompt, **more)
        query = complete(pairs, prompt, nvext={"annotations": ["query_instance_id:"]}).json()
        assert query["nvext"]["worker_id"]["prefill_worker_id"].startswith("prefill-")
        alone = complete(pairs, prompt, disagg_off(), **more)
        choices = alone.json()["choices"]
        assert all(choice.pop("degraded") == ["no_prefill_worker"] for choice in choices)
        assert shared.json()["choices"] == choices
        for usage in ("prompt_tokens", "completion_tokens"):
            assert shared.json()["usage"][usage] == alone.json()["usage"][usage]
        assert "x-sluice-degraded" not in shared.headers
    async with asyncio.timeout(20):
        while await booked(pairs):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def disagg_off() -> dict[str, str]:
    """Only decode workers may be chosen, so one of them does all."""
    return {"x-gateway-destination-endpoint-subset": "worker-0,worker-1"}
