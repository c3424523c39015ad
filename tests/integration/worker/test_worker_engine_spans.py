"""Spans that an engine opens in `generate` are children of the request's `engine.generate`, over every way in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.observability import telemetry
from services.worker.contract.engine import GenerateContext
from services.worker.contract.generation import Delta, FinishReason, GenerateRequest, Usage
from services.worker.server import WorkerServer
from sluice.v1 import common_pb2, worker_pb2_grpc
from tests.support.fakes.engines import ScriptedEngine
from tests.support.servers.workers import Caller, generation, hosted, stub_of

REQUESTS = 8
STEPS = 3
OPENED = [f"engine.step-{step}" for step in range(STEPS)]


class SpanningEngine(ScriptedEngine):
    """Opens a span around each await, another around each yield, and one in a task of its own."""

    async def generate(self, request: GenerateRequest, context: GenerateContext) -> AsyncGenerator[Delta, None]:
        provider = telemetry._provider
        assert provider is not None
        tracer = provider.get_tracer("an engine")

        async def fetch() -> None:
            with tracer.start_as_current_span("engine.fetch", attributes={"of": request.request_id}):
                await asyncio.sleep(0)

        await asyncio.create_task(fetch())
        for step, name in enumerate(OPENED):
            with tracer.start_as_current_span(name, attributes={"of": request.request_id}):
                await asyncio.sleep(0.002)  # the other requests run here
            with tracer.start_as_current_span("engine.yielding", attributes={"of": request.request_id}):
                yield Delta((20 + step,), cached_tokens=0 if step == 0 else None)
        yield Delta(finish_reason=FinishReason.LENGTH, usage=Usage(len(request.token_ids), STEPS))


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for name in ("_tracer", "_provider", "_share"):
        monkeypatch.setattr(telemetry, name, getattr(telemetry, name))
    telemetry.use_tracer_provider(provider)
    yield exporter
    provider.shutdown()


@pytest.fixture
async def host(folder: Path, spans: InMemorySpanExporter) -> AsyncIterator[WorkerServer]:
    async with hosted(folder, engine=f"{__name__}:SpanningEngine") as host:
        yield host


@pytest.fixture
async def stub(host: WorkerServer) -> AsyncIterator[worker_pb2_grpc.WorkerAsyncStub]:
    async with stub_of(host) as stub:
        yield stub


def traceparent(number: int, flags: str = "01") -> str:
    return f"00-{number + 1:032x}-{number + 1:016x}-{flags}"


def check_trees(spans: tuple[ReadableSpan, ...]) -> None:
    """Fails unless each request's spans are below its own `engine.generate`, which is in its caller's trace."""
    generates = {str((span.attributes or {})["request_id"]): span for span in spans if span.name == "engine.generate"}
    assert sorted(generates) == [f"r{number}" for number in range(REQUESTS)]
    for number in range(REQUESTS):
        generate = generates[f"r{number}"]
        assert generate.context is not None
        assert generate.context.trace_id == number + 1
        own = [span for span in spans if (span.attributes or {}).get("of") == f"r{number}"]
        assert sorted(span.name for span in own) == sorted([*OPENED, "engine.fetch", *["engine.yielding"] * STEPS])
        for span in own:
            assert span.parent is not None, f"{span.name} is a root"
            assert span.parent.span_id == generate.context.span_id, span.name
            assert span.context is not None
            assert span.context.trace_id == number + 1


async def test_session_spans_of_eight_requests_nest_under_their_generate(
    stub: worker_pb2_grpc.WorkerAsyncStub, spans: InMemorySpanExporter
) -> None:
    caller, starts = Caller(stub), {}
    for number in range(REQUESTS):
        starts[number] = generation(f"r{number}")
        starts[number].trace.CopyFrom(common_pb2.TraceContext(traceparent=traceparent(number)))
    await caller.send(starts)
    await caller.ended(*starts)
    await caller.close()
    check_trees(spans.get_finished_spans())
    assert not trace.get_current_span().get_span_context().is_valid, "nothing stays attached"


async def test_generate_spans_of_eight_requests_nest_under_their_generate(
    stub: worker_pb2_grpc.WorkerAsyncStub, spans: InMemorySpanExporter
) -> None:
    async def ask(number: int) -> None:
        call = stub.Generate(generation(f"r{number}"), metadata=(("traceparent", traceparent(number)),))
        assert [delta async for delta in call][-1].extra.finish_reason == common_pb2.FINISH_REASON_LENGTH

    async with asyncio.timeout(30):
        await asyncio.gather(*map(ask, range(REQUESTS)))
    check_trees(spans.get_finished_spans())


async def test_session_request_of_an_unsampled_trace_leaves_no_engine_span(
    stub: worker_pb2_grpc.WorkerAsyncStub, spans: InMemorySpanExporter
) -> None:
    caller, unsampled = Caller(stub), generation("r")
    unsampled.trace.CopyFrom(common_pb2.TraceContext(traceparent=traceparent(0, "00")))
    await caller.send({1: unsampled})
    await caller.ended(1)
    await caller.close()
    assert spans.get_finished_spans() == ()


async def test_engine_receives_the_carrier_of_its_own_span(
    folder: Path, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[str] = []

    async def generate(
        self: SpanningEngine, request: GenerateRequest, context: GenerateContext
    ) -> AsyncGenerator[Delta, None]:
        received.append(context.trace["traceparent"])
        yield Delta((20,), FinishReason.LENGTH, Usage(4, 1), cached_tokens=0)

    monkeypatch.setattr(SpanningEngine, "generate", generate)
    async with hosted(folder, engine=f"{__name__}:SpanningEngine") as host, stub_of(host) as stub:
        caller, traced = Caller(stub), generation("r")
        traced.trace.CopyFrom(common_pb2.TraceContext(traceparent=traceparent(0)))
        await caller.send({1: traced})
        await caller.ended(1)
        await caller.close()
    (span,) = [span for span in spans.get_finished_spans() if span.name == "engine.generate"]
    assert span.context is not None
    assert received == [f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"]
