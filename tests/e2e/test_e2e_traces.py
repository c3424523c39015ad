"""One trace from the HTTP request to the worker, a span per stage."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support.collector import Collector, ReceivedSpan
from tests.support.suite import Suite

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
EXPECTED = {
    ("sluice-gateway", "gateway.request"),
    ("sluice-gateway", "gateway.tokenize"),
    ("sluice-gateway", "gateway.route"),
    ("sluice-gateway", "gateway.generate"),
    ("sluice-preprocess", "preprocess.tokenize"),
    ("sluice-router", "router.query"),
    ("sluice-worker", "engine.generate"),
    ("sluice-postprocess", "postprocess.stream"),
}


@pytest.fixture
def collector() -> Iterator[Collector]:
    started = Collector()
    yield started
    started.stop()


def test_one_tree(collector: Collector) -> None:
    services = ("GATEWAY", "PREPROCESS", "ROUTER", "POSTPROCESS", "WORKER")
    env = {f"SLUICE_{service}_OTLP_ENDPOINT": collector.endpoint for service in services}
    env["OTEL_BSP_SCHEDULE_DELAY"] = "100"
    with Suite("--speedup", "20", env=env) as suite:
        answer = httpx.post(
            f"{suite.url}/v1/chat/completions",
            json={"model": "tekken", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True},
            headers={"traceparent": f"00-{TRACE}-{CALLER}-01"},
            timeout=30,
        )
        assert answer.status_code == 200
        deadline = time.monotonic() + 20
        while not {(span.service, span.name) for span in mine(collector)} >= EXPECTED:
            assert time.monotonic() < deadline, sorted((span.service, span.name) for span in mine(collector))
            time.sleep(0.1)
    spans = {span.span: span for span in mine(collector)}
    for span in spans.values():
        assert span.parent in spans or span.parent == CALLER, span
    roots = [span for span in spans.values() if span.parent == CALLER]
    assert [span.name for span in roots] == ["gateway.request"]


def mine(collector: Collector) -> list[ReceivedSpan]:
    return [span for span in collector.spans if span.trace == TRACE]
