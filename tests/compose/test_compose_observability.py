"""The profile observability: all targets are scraped, every dashboard query has data, a trace has every service."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
import urllib.error
import urllib.request
from typing import Any

import httpx
import pytest

from tests.support.clients.chat_load import ChatLoad
from tests.support.oracles.prometheus_queries import answers, dashboard_queries
from tests.support.oracles.promql import series
from tests.support.repository import ROOT
from tests.support.servers.compose_suite import SERVICES, Suite, get_json

OBSERVABILITY = ROOT / "deploy/observability"

pytestmark = pytest.mark.compose


@pytest.fixture(scope="module")
def prometheus(suite: Suite) -> str:
    return suite.address("prometheus", 9090)


def _until_scraped(suite: Suite, prometheus: str) -> None:
    """Waits until each replica of each service is a target that is up, and nothing else is a target."""
    wanted = {service: len(suite.containers(service)) for service in SERVICES}
    deadline = time.monotonic() + 90
    while True:
        up: dict[str, int] = dict.fromkeys(SERVICES, 0)
        targets = get_json(f"{prometheus}/api/v1/targets?state=active")["data"]["activeTargets"]
        for target in targets:
            up[target["labels"]["job"].removeprefix("sluice-")] += target["health"] == "up"
        if up == wanted and len(targets) == sum(wanted.values()):
            return
        assert time.monotonic() < deadline, [(one["scrapeUrl"], one["health"], one["lastError"]) for one in targets]
        time.sleep(1)


async def test_every_replica_is_scraped_also_after_scaling(suite: Suite, prometheus: str) -> None:
    await asyncio.to_thread(_until_scraped, suite, prometheus)
    await asyncio.to_thread(suite.up, {"preprocess": 2, "worker": 2})
    await asyncio.to_thread(_until_scraped, suite, prometheus)


LONG_PROMPT = "The same long prompt again, so that a worker's cache holds it. " * 20
PARSE = """
import asyncio, grpc
from sluice.v1 import postprocess_pb2 as messages, postprocess_pb2_grpc as services
async def main():
    async with grpc.aio.insecure_channel("postprocess:50051") as channel:
        request = messages.ParseRequest(options=messages.StreamOptions(model="tekken"), token_ids=bytes([99, 8, 0, 0]))
        await services.PostprocessStub(channel).Parse(request, timeout=30)
asyncio.run(main())
"""


async def _everything_else(suite: Suite) -> None:
    """What a load of chats has not: repeated prompts, embeddings, a refused request, a scheduler's call."""
    async with httpx.AsyncClient(base_url=suite.url, timeout=60) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        for _ in range(4):
            chat = {"model": model, "messages": [{"role": "user", "content": LONG_PROMPT}], "max_tokens": 4}
            assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        assert (await client.post("/v1/embeddings", json={"model": model, "input": "Hello"})).status_code == 200
        refused = {"model": model, "messages": [{"role": "assistant", "content": "I speak first."}]}
        assert (await client.post("/v1/chat/completions", json=refused)).status_code == 400
    await asyncio.to_thread(suite.execute, suite.containers("gateway")[0], "python", "-c", PARSE)


def _only_in_trouble_or_elsewhere(query: str) -> bool:
    """Whether a suite of mock engines that is well has nothing to say, by the metrics' own declarations."""
    known = series()
    names = re.findall(r"sluice_\w+", query)
    return 'state="differs"' in query or any(known[name].when for name in names)


async def test_every_dashboard_query_has_data_after_a_load(suite: Suite, prometheus: str) -> None:
    queries = dashboard_queries(OBSERVABILITY / "dashboards")
    assert len(queries) > 20
    wanted = [query for query in queries if not _only_in_trouble_or_elsewhere(query[1])]
    assert len(wanted) > 0.85 * len(queries)
    async with ChatLoad(suite.url) as load:
        deadline = time.monotonic() + 240
        while True:
            await load.more(16)
            await _everything_else(suite)
            empty = [query for query in wanted if not await asyncio.to_thread(answers, prometheus, query[1])]
            if not empty:
                break
            assert time.monotonic() < deadline, empty
            await asyncio.sleep(5)
    assert load.failures == []


def test_alert_rules_are_loaded_and_none_fires_for_a_healthy_suite(suite: Suite, prometheus: str) -> None:
    groups = get_json(f"{prometheus}/api/v1/rules?type=alert")["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert rules
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}, rules
    assert {rule["state"] for rule in rules if rule["labels"]["severity"] == "page"} == {"inactive"}


def _trace(backend: str, trace: str) -> list[Any]:
    try:
        return list(get_json(f"{backend}/api/traces/{trace}")["data"])
    except urllib.error.HTTPError:
        return []


def test_a_request_is_one_trace_over_every_service(suite: Suite) -> None:
    trace = secrets.token_hex(16)
    model = get_json(f"{suite.url}/v1/models")["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    headers = {"content-type": "application/json", "traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"}
    request = urllib.request.Request(f"{suite.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200

    backend = suite.address("traces", 16686)
    deadline = time.monotonic() + 60
    while True:
        services = {
            process["serviceName"] for found in _trace(backend, trace) for process in found["processes"].values()
        }
        if services >= {f"sluice-{service}" for service in SERVICES}:
            break
        assert time.monotonic() < deadline, services
        time.sleep(1)
