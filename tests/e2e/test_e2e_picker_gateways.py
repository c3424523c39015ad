"""Two stages: the endpoint picker chooses worker and gateway, and a gateway that chooses nothing runs the request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest

from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.clients.ext_proc import Answered, Exchange
from tests.support.servers.suite import Suite

PATH = "/v1/chat/completions"
QUESTION = "Which way does the river run? " * 8
CHAT = {"model": "tekken", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16}


class TwoStages:
    """A suite whose gateway is direct, and whose router has a picker for it."""

    def __init__(self, *flags: str) -> None:
        port, self.picker = free_port(), f"127.0.0.1:{free_port()}"
        self.metrics = f"127.0.0.1:{free_port()}"
        env = {
            "SLUICE_ROUTER_PICKER_LISTEN": self.picker,
            "SLUICE_ROUTER_PICKER_NOTICE_S": "0",
            "SLUICE_ROUTER_PICKER_GATEWAYS": f"127.0.0.1:{port}",
            "SLUICE_PREPROCESS_METRICS_LISTEN": self.metrics,
        }
        direct = ("--routing", "direct", "--no-migration", "--speedup", "20", "--port", str(port))
        self.suite = Suite(*direct, *flags, env=env)

    def tokenized(self) -> float:
        """Characters that preprocess has tokenized."""
        text = httpx.get(f"http://{self.metrics}/metrics", timeout=20).text
        lines = [line for line in text.splitlines() if line.startswith("sluice_preprocess_cache_characters_total")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def booked(self) -> int:
        """Requests booked."""
        with grpc.insecure_channel(self.suite.address("router")) as channel:
            loads = router_pb2_grpc.RouterStub(channel).GetLoads(router_pb2.GetLoadsRequest(), timeout=20).loads
        return sum(load.requests for load in loads)

    def until_empty(self) -> None:
        """Waits until nothing is booked."""
        deadline = time.monotonic() + 20
        while self.booked():
            assert time.monotonic() < deadline, "requests stay booked"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def whole() -> Iterator[TwoStages]:
    stages = TwoStages("--workers", "3")
    with stages.suite:
        yield stages


@pytest.fixture(scope="module")
def pair() -> Iterator[TwoStages]:
    stages = TwoStages("--workers", "1", "--prefill-workers", "1")
    with stages.suite:
        yield stages


@asynccontextmanager
async def first_stage(stages: TwoStages, body: dict[str, Any], path: str) -> AsyncIterator[tuple[Exchange, Answered]]:
    """Asks the picker as Envoy does; at the end, breaks off and waits until nothing is booked."""
    channel = open_channel(stages.picker)
    exchange = Exchange(channel)
    try:
        yield exchange, await exchange.request(body, path=path)
    finally:
        exchange.cut()
        await channel.close()
        await asyncio.to_thread(stages.until_empty)


async def second_stage(stages: TwoStages, answered: Answered, path: str) -> httpx.Response:
    """Sends to the chosen endpoint what Envoy would send there."""
    headers = {**answered.headers, "x-sluice-receipt": "true", "content-type": "application/json"}
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"http://{answered.endpoints[0]}{path}", content=answered.body, headers=headers)


async def ask(stages: TwoStages, headers: dict[str, str]) -> httpx.Response:
    """Asks the gateway without the first stage."""
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{stages.suite.url}/v1/chat/completions", json=CHAT, headers=headers)


@pytest.mark.parametrize(
    ("path", "body", "ids"),
    [
        ("/v1/chat/completions", CHAT, True),
        ("/v1/completions", {"model": "tekken", "prompt": QUESTION, "max_tokens": 16}, True),
        ("/v1/responses", {"model": "tekken", "input": QUESTION, "max_output_tokens": 16}, False),
        ("/v1/messages", {**CHAT}, False),
    ],
    ids=["chat", "completion", "responses", "messages"],
)
async def test_gateway_runs_the_chosen_worker_and_tokenizes_only_where_it_has_to(
    whole: TwoStages, path: str, body: dict[str, Any], ids: bool
) -> None:
    async with first_stage(whole, body, path) as (exchange, answered):
        assert (b"token_data" in answered.body) is ids
        before = whole.tokenized()
        answer = await second_stage(whole, answered, path)
        assert answer.status_code == 200, answer.text
        assert (whole.tokenized() == before) is ids
        (receipt,) = json.loads(answer.headers["x-sluice-route-receipt"])
        assert receipt["worker"] == answered.headers["x-sluice-worker"].split(",")[0]
        assert receipt["reason"] == "named_by_request"
        assert "predicted_cached_tokens" not in receipt
        assert whole.booked() == 1, "booked by the picker alone"
        await exchange.respond([answer.content], content_type="application/json")
        await exchange.end()


async def test_request_whose_chosen_worker_the_gateway_does_not_know_runs_on_the_next_one(whole: TwoStages) -> None:
    async with first_stage(whole, CHAT, PATH) as (_, answered):
        chosen, *others = answered.headers["x-sluice-worker"].split(",")
        assert {chosen, *others} == {"worker-0", "worker-1", "worker-2"}
        answered.headers["x-sluice-worker"] = ",".join(["ended-1", *others])
        answer = await second_stage(whole, answered, PATH)
        assert answer.status_code == 200, answer.text
        (receipt,) = json.loads(answer.headers["x-sluice-route-receipt"])
        assert receipt["worker"] == others[0]
        assert "next_named_worker" in json.dumps(answer.json()) + str(answer.headers)


async def test_token_ids_and_workers_of_the_client_do_not_reach_the_second_stage(whole: TwoStages) -> None:
    lying = {**CHAT, "nvext": {"token_data": [5] * 3_000, "decode_worker_id": "gone", "prefill_worker_id": "gone"}}
    async with first_stage(whole, lying, PATH) as (_, answered):
        answer = (await second_stage(whole, answered, PATH)).json()
    async with first_stage(whole, CHAT, PATH) as (_, answered):
        honest = (await second_stage(whole, answered, PATH)).json()
    assert answer["usage"]["prompt_tokens"] == honest["usage"]["prompt_tokens"]
    assert answer["choices"][0]["message"] == honest["choices"][0]["message"]


async def test_several_prompts_of_one_request_are_answered(whole: TwoStages) -> None:
    body = {"model": "tekken", "prompt": [QUESTION, "And now?"], "max_tokens": 4}
    async with first_stage(whole, body, "/v1/completions") as (_, answered):
        answer = await second_stage(whole, answered, "/v1/completions")
    assert len(answer.json()["choices"]) == 2


async def test_answer_of_two_stages_is_that_of_one(whole: TwoStages) -> None:
    async with first_stage(whole, CHAT, PATH) as (_, answered):
        staged = (await second_stage(whole, answered, PATH)).json()
    plain = (await ask(whole, {"x-sluice-worker": "worker-0"})).json()
    assert staged["choices"][0]["message"] == plain["choices"][0]["message"]
    assert staged["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


async def test_pair_is_booked_named_and_run(pair: TwoStages) -> None:
    async with first_stage(pair, CHAT, PATH) as (_, answered):
        named = answered.headers["x-sluice-worker"], answered.headers["x-sluice-prefill-worker"]
        assert named == ("worker-0", "prefill-0")
        assert pair.booked() == 2
        answer = await second_stage(pair, answered, PATH)
        (receipt,) = json.loads(answer.headers["x-sluice-route-receipt"])
        assert (receipt["worker"], receipt["prefill_worker"]) == named


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 400, "no_worker_named"),
        ({"x-sluice-worker": "gone"}, 503, "worker_not_found"),
        ({"x-sluice-worker": "worker-0", "x-sluice-dp-rank": "7"}, 400, "invalid_value"),
    ],
    ids=["missing", "unknown", "rank"],
)
async def test_second_stage_without_a_valid_worker_is_rejected(
    whole: TwoStages, headers: dict[str, str], status: int, code: str
) -> None:
    answer = await ask(whole, headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert whole.booked() == 0
