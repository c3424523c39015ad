"""After a load every process exposes what the catalogue says, and nothing else of ours."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import httpx
import pytest

from scripts.pages import metrics
from tests.support.oracles.scraped import METRICS_EVERYWHERE, endpoints, families, value
from tests.support.servers.suite import Suite

PROCESSES = {"gateway": 1, "preprocess": 1, "router": 1, "worker": 2, "postprocess": 1}


@pytest.fixture(scope="module")
def suite() -> object:
    with Suite("--speedup", "20", env=METRICS_EVERYWHERE) as running:
        yield running


async def load(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def chat(index: int, stream: bool) -> None:
            body = {
                "model": "tekken",
                "messages": [{"role": "user", "content": f"{index % 3} " + "a story about a river " * 40}],
                "max_tokens": 20,
                "stream": stream,
            }
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text

        await asyncio.gather(*(chat(index, index % 2 == 0) for index in range(24)))
        assert (await client.post("/v1/embeddings", json={"model": "tekken", "input": "hi"})).status_code == 200
        assert (await client.post("/v1/chat/completions", json={"model": "none", "messages": []})).status_code >= 400
        assert (await client.get("/nowhere")).status_code == 404


async def test_a_running_suite_exposes_the_catalogue(suite: Suite) -> None:
    await load(suite.url)
    urls = endpoints(suite.output, sum(PROCESSES.values()))
    await asyncio.sleep(1)  # the event loops' lag is looked at twice a second
    scraped = [families(url) for url in urls]

    declared = {one.exposed.removesuffix("_total"): one for one in metrics.declared()}
    seen: defaultdict[str, int] = defaultdict(int)
    for found in scraped:
        for name, family in found.items():
            if not name.startswith("sluice_"):
                continue
            one = declared.get(name)
            assert one is not None, f"{name} is not in the catalogue"
            assert family.type == one.kind, name
            assert family.documentation == one.meaning, name
            for sample in family.samples:
                assert set(sample.labels) - {"le"} == {label.name for label in one.labels}, sample
            seen[name] += 1

    for name, one in declared.items():
        wanted = sum(PROCESSES.values()) if one.service == "process" else PROCESSES[one.service]
        if one.when:
            assert seen[name] <= wanted, name
        elif one.kind == "histogram" and one.service in ("worker", "process"):
            assert seen[name] >= 1, f"{name} is not exposed"  # one of the workers may have had nothing to do
        else:
            assert seen[name] == wanted, f"{name} is exposed {seen[name]} times, not {wanted}"


async def test_the_figures_are_those_of_the_load(suite: Suite) -> None:
    urls = endpoints(suite.output, sum(PROCESSES.values()))
    before = [families(url) for url in urls]
    await load(suite.url)
    after = [families(url) for url in urls]

    def more(name: str, **labels: str) -> float:
        return sum(value(found, name, **labels) for found in after) - sum(
            value(found, name, **labels) for found in before
        )

    assert more("sluice_gateway_generations_total", model="tekken", outcome="finished") == 24
    assert more("sluice_gateway_output_tokens_total", model="tekken") == more("sluice_worker_output_tokens_total")
    assert more("sluice_gateway_output_tokens_total") == 24 * 20
    assert more("sluice_gateway_time_to_first_token_seconds_count") == 24
    assert more("sluice_gateway_inter_token_seconds_count") == 24
    assert more("sluice_worker_requests_total", reason="length") == 24
    assert more("sluice_router_reservations_total") == 24
    assert more("sluice_postprocess_finished_streams_total", reason="length") == 24
    assert more("sluice_postprocess_tokens_total") == 24 * 20
    assert more("sluice_process_stage_seconds_count", stage="gateway.tokenize", outcome="ok") >= 24
    assert more("sluice_process_stage_seconds_count", stage="router.query", outcome="ok") >= 24
    assert more("sluice_gateway_http_requests_total", path="other", status="404") == 1
    assert more("sluice_process_errors_total", service="gateway") >= 1
    cached = more("sluice_worker_cached_tokens_total")
    assert cached > 0
    assert more("sluice_gateway_cached_tokens_total") == cached
    assert more("sluice_router_best_tokens_total") >= more("sluice_router_predicted_tokens_total") > 0
