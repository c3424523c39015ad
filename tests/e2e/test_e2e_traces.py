"""One trace from the HTTP request to the worker, a span per stage, whatever way the request goes."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator

import grpc
import httpx
import pytest

from sluice.v1 import worker_pb2, worker_pb2_grpc
from tests.support.fakes.spanning_engine import EACH, FIRST, SpanningEngine
from tests.support.servers.collector import Collector, ReceivedSpan, env_of
from tests.support.servers.suite import Suite

ENGINE = f"{SpanningEngine.__module__}:{SpanningEngine.__name__}"
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


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    started = Collector()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[Suite]:
    """Records what the client asks to be recorded, and nothing else. Its engine opens spans of its own."""
    env = {**env_of(collector.endpoint), "SLUICE_GATEWAY_TRACE_SAMPLE": "0", "SLUICE_GATEWAY_LOG_FORMAT": "json"}
    with Suite("--speedup", "20", "--engine", ENGINE, env=env) as running:
        yield running


def chat(suite: Suite, trace: str, tokens: int = 5, sampled: bool = True) -> httpx.Response:
    body = {
        "model": "tekken",
        "messages": [{"role": "user", "content": f"hi {trace}"}],
        "max_tokens": tokens,
        "stream": True,
    }
    headers = {"traceparent": f"00-{trace}-{CALLER}-{'01' if sampled else '00'}"} if trace else {}
    answer = httpx.post(f"{suite.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def awaited(reached: Callable[[], bool], said: Callable[[], object], within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)


def complete(collector: Collector, trace: str, wanted: set[tuple[str, str]]) -> dict[str, ReceivedSpan]:
    """The spans of a trace by id, when all that are wanted have come; one tree below the caller's span."""

    def names() -> set[tuple[str, str]]:
        return {(span.service, span.name) for span in collector.of(trace)}

    awaited(lambda: names() >= wanted, lambda: sorted(wanted - names()))
    found = collector.of(trace)
    spans = {span.span: span for span in found}
    assert len(spans) == len(found), "a span is exported once"
    for span in spans.values():
        assert span.parent in spans or span.parent == CALLER, span
    assert [span.name for span in spans.values() if span.parent == CALLER] == ["gateway.request"]
    return spans


def number(attribute: object) -> float:
    assert isinstance(attribute, int | float)
    return attribute


def test_a_streamed_request_is_one_tree(traced: Suite, collector: Collector) -> None:
    trace = secrets.token_hex(16)
    chat(traced, trace)
    spans = complete(collector, trace, EXPECTED | {("sluice-worker", FIRST), ("sluice-worker", EACH)})
    parents = {(span.name, spans[span.parent].name) for span in spans.values() if span.parent != CALLER}
    assert parents >= {
        ("preprocess.tokenize", "gateway.tokenize"),
        ("router.query", "gateway.route"),
        ("engine.generate", "gateway.generate"),
        ("postprocess.stream", "gateway.generate"),
        ("gateway.generate", "gateway.request"),
        (FIRST, "engine.generate"),
        (EACH, "engine.generate"),
    }
    (engine,) = [span for span in spans.values() if span.name == "engine.generate"]
    said = engine.attributes
    assert (said["model"], said["role"], said["finish_reason"], said["cancelled"]) == (
        "tekken", "aggregated", "length", False,
    )  # fmt: skip
    assert number(said["input_tokens"]) > 5
    assert number(said["output_tokens"]) == 5
    assert number(said["ttft_ms"]) > 0
    pace = [number(said[f"inter_token_ms_{which}"]) for which in ("p50", "p99", "max")]
    assert 0 < pace[0] <= pace[1] <= pace[2]
    assert 0 < number(said["inter_token_ms_avg"]) <= pace[2]
    assert "error_kind" not in said


def test_what_the_client_does_not_sample_leaves_no_span(traced: Suite, collector: Collector) -> None:
    unsampled, sampled = secrets.token_hex(16), secrets.token_hex(16)
    known = {span.trace for span in collector.spans}
    chat(traced, unsampled, sampled=False)
    chat(traced, "")  # the gateway's own decision: a share of 0
    chat(traced, sampled)
    complete(collector, sampled, EXPECTED)
    assert {span.trace for span in collector.spans} - known <= {sampled}, "no service decides by itself"


def test_a_migrated_request_is_one_tree_with_a_link(traced: Suite, collector: Collector) -> None:
    with grpc.insecure_channel(traced.address("worker")) as channel:
        control = worker_pb2_grpc.WorkerStub(channel).Control

        def inject(fault: str) -> None:
            action = worker_pb2.ControlRequest.Action.ACTION_INJECT_FAULT
            control(worker_pb2.ControlRequest(action=action, arguments={"fault": fault}), timeout=20)

        inject("error_after=3")
        try:
            moved = ""
            for _ in range(20):  # the router takes the other worker half of the time
                trace = secrets.token_hex(16)
                if '"migrations":1' in chat(traced, trace, tokens=12).text:
                    moved = trace
                    break
            assert moved, "no request was on the worker that fails"
        finally:
            inject("none")
    spans = complete(collector, moved, EXPECTED | {("sluice-gateway", "gateway.resume")})
    awaited(
        lambda: sum(span.name == "engine.generate" for span in collector.of(moved)) == 2, lambda: collector.of(moved)
    )
    by_name = {span.name: span for span in spans.values()}
    generate, resume = by_name["gateway.generate"], by_name["gateway.resume"]
    assert resume.parent == generate.span
    assert resume.links == (generate.span,)
    assert "migrated" in generate.events
    engines = {span.parent: span for span in collector.of(moved) if span.name == "engine.generate"}
    assert set(engines) == {generate.span, resume.span}, "each worker continues the way that led to it"
    assert engines[generate.span].attributes["error_kind"]
    assert engines[resume.span].attributes["finish_reason"] == "length"


def test_a_request_of_two_workers_is_one_tree_with_a_link(collector: Collector) -> None:
    flags = ("--prefill-workers", "1", "--workers", "1", "--speedup", "20")
    trace = secrets.token_hex(16)
    with Suite(*flags, env=env_of(collector.endpoint)) as pair:
        chat(pair, trace, tokens=8)

        def engines() -> list[ReceivedSpan]:
            return [span for span in collector.of(trace) if span.name == "engine.generate"]

        awaited(lambda: len(engines()) == 2, lambda: collector.of(trace))
        spans = complete(collector, trace, EXPECTED)
    (generate,) = [span for span in spans.values() if span.name == "gateway.generate"]
    prefill, decode = sorted(engines(), key=lambda span: str(span.attributes["finish_reason"]) != "handoff")
    assert (prefill.attributes["finish_reason"], decode.attributes["finish_reason"]) == ("handoff", "length")
    assert (prefill.attributes["role"], decode.attributes["role"]) == ("prefill", "decode")
    assert prefill.parent == decode.parent == generate.span
    assert prefill.links == ()
    assert decode.links == (prefill.span,), "the decode worker goes on where the prefill worker was"
    assert "handed over" in generate.events


def test_log_lines_of_a_traced_request_carry_its_ids(traced: Suite) -> None:
    trace = secrets.token_hex(16)
    body = {"model": "tekken", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
    with grpc.insecure_channel(traced.address("worker")) as channel:
        control = worker_pb2_grpc.WorkerStub(channel).Control
        action = worker_pb2.ControlRequest.Action.ACTION_INJECT_FAULT
        control(worker_pb2.ControlRequest(action=action, arguments={"fault": "error_after=1"}), timeout=20)
        try:
            for _ in range(20):
                headers = {"traceparent": f"00-{trace}-{CALLER}-01"}
                httpx.post(f"{traced.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
                if moves(traced, trace):
                    break
        finally:
            control(worker_pb2.ControlRequest(action=action, arguments={"fault": "none"}), timeout=20)
    line = moves(traced, trace)[-1]
    assert line["service"] == "gateway"
    assert line["level"] == "warning"
    assert line["request_id"]


def moves(suite: Suite, trace: str) -> list[dict[str, str]]:
    """What the gateway says about the generations of a trace that move; the task that says it serves many requests."""
    lines = [
        line[line.index("{") :] for line in list(suite.output) if "moves to another worker" in line and "{" in line
    ]
    return [found for line in lines if (found := json.loads(line)).get("trace_id") == trace]
