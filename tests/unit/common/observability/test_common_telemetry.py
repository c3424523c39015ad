"""Spans across stages and services, and stage times."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextvars import copy_context
from random import Random

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry

from services.common.base import logs
from services.common.base.errors import SluiceError, invalid, unavailable
from services.common.observability import telemetry
from services.common.observability.instruments import expose, read
from services.common.observability.process_metrics import LAG_EVERY_S, ProcessMetrics
from sluice.v1 import common_pb2


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    monkeypatch.setattr(telemetry, "_tracer", None)
    monkeypatch.setattr(telemetry, "_provider", None)
    monkeypatch.setattr(telemetry, "_share", 1.0)
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.use_tracer_provider(provider)
    return exporter


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_tracer", None)


@pytest.mark.usefixtures("off")
def test_off_is_one_shared_context_and_no_headers() -> None:
    with telemetry.stage("a") as span, telemetry.stage("b", parent={}, tokens=3):
        assert span is None
    assert telemetry.stage("a") is telemetry.stage("b", parent={"traceparent": "x"}, tokens=3)
    assert telemetry.start_span("a") is None
    assert telemetry.headers() == {}
    assert telemetry.grpc_metadata() is None
    assert telemetry.trace_context() is None
    assert telemetry.carrier_of_metadata([("traceparent", "x")]) == {}
    assert not telemetry.tracing()


def test_stages_nest_and_keep_their_attributes(spans: InMemorySpanExporter) -> None:
    with telemetry.stage("outer", kind=SpanKind.SERVER), telemetry.stage("inner", tokens=3, lora=None):
        pass
    inner, outer = spans.get_finished_spans()
    assert (inner.name, outer.name, outer.kind) == ("inner", "outer", SpanKind.SERVER)
    assert inner.parent is not None
    assert inner.parent.span_id == outer.context.span_id
    assert dict(inner.attributes or {}) == {"tokens": 3}


def test_error_marks_the_stage_and_goes_on(spans: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="odd"), telemetry.stage("a"):
        raise ValueError("odd")
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR


def test_unary_calls_name_the_request_they_are_made_for() -> None:
    def served() -> str:
        telemetry.name_request([("user-agent", "x"), *(telemetry.grpc_metadata() or ())])
        return logs.request_id.get()

    def called(name: str) -> list[tuple[str, str]]:
        logs.request_id.set(name)
        return [pair for pair in telemetry.grpc_metadata() or () if pair[0] == telemetry.REQUEST_KEY]

    assert copy_context().run(called, "req-1") == [("sluice-request-id", "req-1")]
    for unfit in ("", "größe", "a\nb"):  # a caller of the router may choose any; metadata takes only plain ASCII
        assert copy_context().run(called, unfit) == []
    named = copy_context()
    named.run(called, "req-2")
    assert named.run(served) == "req-2"


def test_span_without_a_block_of_code(spans: InMemorySpanExporter) -> None:
    span = telemetry.start_span("worker.generate", tokens=2, lora=None)
    assert span is not None
    sent = telemetry.trace_context(span)
    telemetry.fail_span(span, "engine is gone")
    span.end()
    (ended,) = spans.get_finished_spans()
    assert ended.status.description == "engine is gone"
    assert sent is not None
    assert format(ended.context.span_id, "016x") in sent.traceparent


def test_empty_carrier_starts_a_new_trace(spans: InMemorySpanExporter) -> None:
    with telemetry.stage("outer"), telemetry.stage("inner", parent=telemetry.carrier(common_pb2.TraceContext())):
        pass
    inner, outer = spans.get_finished_spans()
    assert inner.name == "inner"
    assert outer.name == "outer"
    assert inner.parent is None or inner.context.trace_id == outer.context.trace_id


@pytest.mark.parametrize("header", [f"00-{'a' * 32}-{'b' * 16}-00", f"00-{'a' * 32}-{'b' * 16}-02"])
def test_an_unsampled_caller_is_followed_without_spans(spans: InMemorySpanExporter, header: str) -> None:
    with telemetry.stage("router.query", parent={"traceparent": header}) as span:
        assert span is None
        with telemetry.stage("inner") as inner:
            assert inner is None
        assert telemetry.start_span("started") is None
        passed_on = telemetry.headers()["traceparent"]
        assert passed_on.split("-")[1] == "a" * 32
        assert int(passed_on.split("-")[3], 16) & 1 == 0
    assert telemetry.start_span("started", parent={"traceparent": header}) is None
    assert spans.get_finished_spans() == ()
    with telemetry.stage("after") as span:
        assert span is not None, "what the caller decided was about its own trace"


def test_a_trace_that_is_not_drawn_is_recorded_nowhere(spans: InMemorySpanExporter) -> None:
    assert telemetry._provider is not None
    telemetry.use_tracer_provider(telemetry._provider, share=0.0)
    with telemetry.stage("gateway.request", parent={}) as span:
        assert span is None
        passed_on = telemetry.headers()
        assert telemetry.start_span("engine.generate") is None
    telemetry.use_tracer_provider(telemetry._provider)  # the next service would record all that begin in it
    with telemetry.stage("router.query", parent=passed_on) as span:
        assert span is None
        assert telemetry.headers() == passed_on
    assert telemetry.start_span("started", parent=passed_on) is None
    assert spans.get_finished_spans() == ()


def test_a_caller_that_records_is_followed_whatever_is_drawn_here(spans: InMemorySpanExporter) -> None:
    assert telemetry._provider is not None
    telemetry.use_tracer_provider(telemetry._provider, share=0.0)
    with telemetry.stage("router.query", parent={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}) as span:
        assert span is not None
        with telemetry.stage("inner") as inner:
            assert inner is not None
    assert len(spans.get_finished_spans()) == 2


def test_a_share_of_the_traces_is_drawn(spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    assert telemetry._provider is not None
    telemetry.use_tracer_provider(telemetry._provider, share=0.25)
    monkeypatch.setattr(telemetry, "random", Random(7).random)
    for _ in range(400):
        with telemetry.stage("gateway.request", parent={}), telemetry.stage("gateway.route"):
            pass
    names = Counter(span.name for span in spans.get_finished_spans())
    assert names["gateway.request"] == names["gateway.route"]
    assert 70 < names["gateway.request"] < 130


@pytest.mark.parametrize("header", ["", "-00", "x" * 52 + "-00", f"00-{'0' * 32}-{'0' * 16}-00", "z-" * 26 + "-00"])
def test_a_header_that_is_none_starts_a_trace(spans: InMemorySpanExporter, header: str) -> None:
    with telemetry.stage("router.query", parent={"traceparent": header}) as span:
        assert span is not None
    (ended,) = spans.get_finished_spans()
    assert ended.parent is None


@pytest.mark.parametrize(
    "header", [f"00-{'0' * 32}-{'b' * 16}-00", f"00-{'g' * 32}-{'b' * 16}-00", f"00-{'a' * 49}-00"]
)
def test_invalid_parent_header_starts_no_trace(spans: InMemorySpanExporter, header: str) -> None:
    assert len(header) == telemetry.TRACEPARENT_LENGTH
    with telemetry.stage("router.query", parent={"traceparent": header}) as span:
        assert span is not None
    (ended,) = spans.get_finished_spans()
    assert ended.parent is None


def test_failed_stage_records_its_error_and_a_cancelled_one_none(spans: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="odd"), telemetry.stage("failed"):
        raise ValueError("odd")
    with pytest.raises(asyncio.CancelledError), telemetry.stage("left"):
        raise asyncio.CancelledError
    failed, left = spans.get_finished_spans()
    assert failed.status.description == "ValueError: odd"
    assert [event.name for event in failed.events] == ["exception"]
    assert left.status.status_code is StatusCode.UNSET


@pytest.fixture
async def measured(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessMetrics]:
    monkeypatch.setattr(telemetry, "_tracer", None)
    metrics = ProcessMetrics("router", asyncio.get_running_loop())
    metrics.start()
    yield metrics
    metrics.close()


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    assert telemetry.on_stage is None
    assert telemetry.on_error is None


def seen(name: str) -> dict[tuple[str, ...], float]:
    return {labels: value for labels, value in read(f"sluice_process_{name}").items() if value}


async def test_stages_are_timed_with_their_outcome(measured: ProcessMetrics) -> None:
    with telemetry.stage("router.query") as span:
        assert span is None, "nothing is traced"
    with pytest.raises(SluiceError), telemetry.stage("router.query"):
        raise invalid("no")
    with pytest.raises(asyncio.CancelledError), telemetry.stage("router.query"):
        raise asyncio.CancelledError
    stage = ("router", "router.query")
    assert seen("stage_seconds") == {(*stage, "ok"): 1, (*stage, "error"): 1, (*stage, "cancelled"): 1}


async def test_a_stage_is_traced_and_timed_at_once(measured: ProcessMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("test"))
    with telemetry.stage("outer"), telemetry.stage("inner", tokens=3):
        pass
    assert [span.name for span in exporter.get_finished_spans()] == ["inner", "outer"]
    assert {stage for _, stage, _ in seen("stage_seconds")} == {"inner", "outer"}


async def test_errors_and_lines_are_counted(measured: ProcessMetrics) -> None:
    telemetry.failed(unavailable("gone"))
    telemetry.failed(unavailable("gone"))
    logging.getLogger("services.x").warning("odd")
    logging.getLogger("services.x").error("bad")
    assert seen("errors") == {("router", "unavailable"): 2}
    assert seen("log_lines") == {("router", "warning"): 1, ("router", "error"): 1}


async def test_a_loop_that_is_kept_busy_lags(measured: ProcessMetrics) -> None:
    await asyncio.sleep(0)
    time.sleep(LAG_EVERY_S + 0.3)  # noqa: ASYNC251  what must not happen
    await asyncio.sleep(0.05)
    assert seen("event_loop_lag_seconds")[("router",)] >= 1
    registry = CollectorRegistry()
    expose(registry)
    late = registry.get_sample_value("sluice_process_event_loop_lag_seconds_sum", {"service": "router"})
    assert late is not None
    assert late >= 0.3


async def test_what_the_process_is(measured: ProcessMetrics) -> None:
    ((service, version, python),) = seen("build_info")
    assert (service, bool(version), bool(python)) == ("router", True, True)
    assert seen("tasks")[("router",)] >= 1
    assert read("sluice_process_sessions") == {("router",): 0}
