"""A gateway before a server of vLLM whose usage comes last: what clients and receipts are told of tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.data.tiny_models import build_tiny_model
from tests.support.fakes.fake_http_engines import BLOCK, FakeVllm, served
from tests.support.servers.engine_file_suite import EngineFileSuite, up_with_engines

PROMPT = list(range(10, 10 + 3 * BLOCK + 3))
ASKED = {"x-sluice-receipt": "true"}
HEADER = "x-sluice-route-receipt"


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[EngineFileSuite, FakeVllm]]:
    fake = FakeVllm(str(build_tiny_model(folder)))
    async with served(fake) as url, up_with_engines(folder, {"one": {"url": url}}, BLOCK) as suite:
        await suite.until_workers(1)
        yield suite, fake


def body_of(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **more}


async def test_tokens_of_a_server_that_counts_them_last_reach_clients_and_receipts(tmp_path: Path) -> None:
    async with running(tmp_path) as (suite, fake):
        await _caches(suite, fake)
        await _stops_at_a_string(suite, fake)
        await _loses_its_client(suite, fake)
        await _refuses_a_constraint(suite, fake)


async def _caches(suite: EngineFileSuite, fake: FakeVllm) -> None:
    fake.usage_s = 0.2
    for expected in (0, 3 * BLOCK):
        answer = await suite.client.post("/v1/completions", json=body_of(PROMPT), headers=ASKED)
        usage = answer.json()["usage"]
        (receipt,) = json.loads(answer.headers[HEADER])
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 8)
        assert usage["prompt_tokens_details"]["cached_tokens"] == receipt["delivered_cached_tokens"] == expected
        await suite.until_index(PROMPT, held=True)
    assert receipt["predicted_cached_tokens"] == expected
    streamed = body_of(PROMPT, stream=True, stream_options={"include_usage": True})
    answer = await suite.client.post("/v1/completions", json=streamed, headers=ASKED)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    (route,) = [event["choices"][0]["route"] for event in events if event["choices"] and "route" in event["choices"][0]]
    (usage,) = [event["usage"] for event in events if event.get("usage")]
    assert route["delivered_cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] == expected


async def _stops_at_a_string(suite: EngineFileSuite, fake: FakeVllm) -> None:
    whole = (await suite.client.post("/v1/completions", json=body_of(PROMPT))).json()["choices"][0]["text"]
    stop = whole[:3]  # the stand-in's tokens are bytes without a text of their own, so that all characters are alike
    answer = await suite.client.post("/v1/completions", json=body_of(PROMPT, max_tokens=400, stop=stop), headers=ASKED)
    (choice,) = answer.json()["choices"]
    usage = answer.json()["usage"]
    (receipt,) = json.loads(answer.headers[HEADER])
    assert (choice["finish_reason"], choice["text"]) == ("stop", "")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 3)
    assert receipt["predicted_cached_tokens"] == 3 * BLOCK
    assert "delivered_cached_tokens" not in receipt  # the server would have counted them at the end
    await suite.until_index(PROMPT, held=True)
    await suite.until(lambda: not fake.running)


async def _loses_its_client(suite: EngineFileSuite, fake: FakeVllm) -> None:
    before = fake.disconnected
    fake.gate.clear()
    async with suite.client.stream("POST", "/v1/completions", json=body_of(PROMPT, stream=True)) as response:
        async for line in response.aiter_lines():
            if "text" in line:
                break
    await suite.until(lambda: fake.disconnected == before + 1)
    fake.gate.set()
    await suite.until_index(PROMPT, held=True)  # and no reservation is left
    assert fake.running == 0
    metrics = (await suite.client.get("/metrics")).text
    assert 'sluice_gateway_generations_total{model="tiny",outcome="cancelled"} 1.0' in metrics.splitlines()


async def _refuses_a_constraint(suite: EngineFileSuite, fake: FakeVllm) -> None:
    fake.failure = (500, "Internal server error")
    refused = body_of(PROMPT, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {}}})
    answer = await asyncio.wait_for(suite.client.post("/v1/completions", json=refused), 60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "response_format"), error
