"""What a worker shows: the span of a generation with its links, and the engine's own metrics on its endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, Counter, generate_latest

from services.common.observability import telemetry
from services.worker.contract.generation import Delta, Disaggregation, GenerateRequest, Role
from services.worker.engines.mock import MockEngine
from services.worker.generation.response_sink import StreamResponseSink
from services.worker.generation.tracing import LINK
from services.worker.serving.engine_metrics import EngineMetrics
from services.worker.serving.worker import Worker
from services.worker.settings import WorkerSettings
from tests.support.fakes.engines import ScriptedEngine, request
from tests.support.servers.mock_workers import generate

EARLIER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PARENT = "00-1af7651916cd43dd8448eb211c80319c-c7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for name in ("_tracer", "_provider"):
        monkeypatch.setattr(telemetry, name, getattr(telemetry, name))
    telemetry.use_tracer_provider(provider)
    yield exporter
    provider.shutdown()


async def run(worker: Worker, asked: GenerateRequest, trace: dict[str, str] | None = None) -> Delta:
    return (await generate(worker, asked, trace))[-1]


async def mock(folder: Path, role: str = "aggregated") -> Worker:
    worker = Worker(MockEngine.from_args(WorkerSettings(model=f"tiny={folder}", role=role, speedup=1e6)), role)
    await worker.start()
    return worker


def named(spans: Sequence[ReadableSpan]) -> list[ReadableSpan]:
    return [span for span in spans if span.name == "engine.generate"]


async def test_generation_span_has_the_outcome(folder: Path, spans: InMemorySpanExporter) -> None:
    worker = await mock(folder)
    asked = request(max_tokens=20, ignore_eos=True, logprobs=1)
    await run(worker, asked, {"traceparent": PARENT, LINK: EARLIER})
    await worker.cleanup()
    (span,) = named(spans.get_finished_spans())
    said = dict(span.attributes or {})
    assert (said["model"], said["role"], said["input_tokens"], said["output_tokens"]) == ("tiny", "aggregated", 4, 20)
    assert (said["finish_reason"], said["cancelled"]) == ("length", False)
    for name in ("ttft_ms", "inter_token_ms_avg", "inter_token_ms_p50", "inter_token_ms_p99", "inter_token_ms_max"):
        assert float(str(said[name])) >= 0
    assert float(str(said["inter_token_ms_max"])) >= float(str(said["inter_token_ms_p50"]))
    assert "error_kind" not in said
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert [f"{link.context.span_id:016x}" for link in span.links] == [EARLIER.split("-")[2]]


async def test_cancels_and_errors_show(spans: InMemorySpanExporter) -> None:
    worker = Worker(ScriptedEngine([Delta((5,)), RuntimeError("secret")]), "w")
    await worker.start()
    await run(worker, request("broken"))
    holding = Worker(ScriptedEngine([Delta((5,))], hold=True), "w")
    await holding.start()
    delivery = StreamResponseSink()
    holding.submit(request("held"), delivery)
    await asyncio.sleep(0)
    holding.cancel(delivery)
    async with asyncio.timeout(30):
        assert [delta async for delta in delivery.deltas()]
    broken, held = (dict(span.attributes or {}) for span in named(spans.get_finished_spans()))
    assert (broken["finish_reason"], broken["error_kind"]) == ("error", "internal")
    assert (held["finish_reason"], held["cancelled"]) == ("cancelled", True)


async def test_the_decode_span_links_to_the_prefill_span(folder: Path, spans: InMemorySpanExporter) -> None:
    prefill, decode = await mock(folder, "prefill"), await mock(folder, "decode")
    asked = request(max_tokens=5, ignore_eos=True)
    handed = await run(prefill, replace(asked, disaggregation=Disaggregation(Role.PREFILL)))
    await run(decode, replace(asked, disaggregation=Disaggregation(Role.DECODE, handed.handoff)))
    for worker in (prefill, decode):
        await worker.cleanup()
    first, second = named(spans.get_finished_spans())
    assert first.context is not None
    assert [link.context.span_id for link in second.links] == [first.context.span_id]


async def test_without_tracing_nothing_is_measured(folder: Path) -> None:
    worker = await mock(folder)
    delivery = StreamResponseSink()
    worker.submit(request(max_tokens=2), delivery)
    assert not delivery._traced
    await worker.drain(5)
    await worker.cleanup()


TEXT = """# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model="tiny"} 3
# HELP engine_steps Steps.
# TYPE engine_steps counter
engine_steps_total 7
# TYPE sluice_worker_requests counter
sluice_worker_requests_total 1
# TYPE taken gauge
taken 9
"""


def test_engine_metrics_appear_once_under_their_names() -> None:
    registry = CollectorRegistry()
    Counter("taken", "ours", registry=registry).inc()
    bridge = EngineMetrics(lambda: TEXT, registry)
    bridge.register()
    shown = generate_latest(registry).decode()
    assert 'vllm:num_requests_running{model="tiny"} 3.0' in shown
    assert "engine_steps_total 7.0" in shown
    assert "sluice_worker_requests" not in shown
    assert "taken 9" not in shown
    bridge.close()
    bridge.close()
    assert "engine_steps_total" not in generate_latest(registry).decode()


def test_an_engine_that_asks_the_same_registry_does_not_ask_itself() -> None:
    registry = CollectorRegistry()
    bridge = EngineMetrics(lambda: generate_latest(registry).decode(), registry)
    bridge.register()
    Counter("engine_own", "kept in the process's registry", registry=registry).inc(2)
    assert generate_latest(registry).decode().count("engine_own_total 2.0") == 1


def test_broken_metrics_cost_nothing_but_a_line(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    EngineMetrics(lambda: "{{{{", registry).register()
    EngineMetrics(lambda: str(1 / 0), registry).register()
    for _ in range(3):
        generate_latest(registry)
    assert caplog.text.count("cannot be read") == 2
