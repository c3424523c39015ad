"""Spans nest across stages and services; while tracing is off they cost nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextvars import copy_context
from random import Random

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from services.common import logs
from services.common.observability import telemetry
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


def test_trace_goes_on_over_a_session_message(spans: InMemorySpanExporter) -> None:
    with telemetry.stage("gateway.request"):
        sent = telemetry.trace_context()
    assert sent is not None
    received = common_pb2.TraceContext.FromString(sent.SerializeToString())
    with telemetry.stage("worker.generate", parent=telemetry.carrier(received)):
        pass
    gateway, worker = spans.get_finished_spans()
    assert worker.context.trace_id == gateway.context.trace_id
    assert worker.parent is not None
    assert worker.parent.span_id == gateway.context.span_id


def test_trace_goes_on_over_unary_metadata(spans: InMemorySpanExporter) -> None:
    with telemetry.stage("gateway.route"):
        metadata = telemetry.grpc_metadata()
    assert metadata is not None
    carrier = telemetry.carrier_of_metadata([*metadata, ("user-agent", "x")])
    with telemetry.stage("router.route", parent=carrier):
        pass
    gateway, router = spans.get_finished_spans()
    assert router.context.trace_id == gateway.context.trace_id


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


def test_spans_give_their_ids_to_the_log(spans: InMemorySpanExporter) -> None:
    span = telemetry.start_span("engine.generate", request_id="req-3")
    assert span is not None
    assert logs._traced["req-3"] == span.get_span_context()


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


def test_empty_carrier_starts_a_trace_of_its_own(spans: InMemorySpanExporter) -> None:
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
def test_a_caller_who_says_nothing_of_use_begins_no_trace(spans: InMemorySpanExporter, header: str) -> None:
    assert len(header) == telemetry.TRACEPARENT_LENGTH
    with telemetry.stage("router.query", parent={"traceparent": header}) as span:
        assert span is not None
    (ended,) = spans.get_finished_spans()
    assert ended.parent is None


def test_a_failed_stage_says_what_failed_and_a_cancelled_one_does_not(spans: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="odd"), telemetry.stage("failed"):
        raise ValueError("odd")
    with pytest.raises(asyncio.CancelledError), telemetry.stage("left"):
        raise asyncio.CancelledError
    failed, left = spans.get_finished_spans()
    assert failed.status.description == "ValueError: odd"
    assert [event.name for event in failed.events] == ["exception"]
    assert left.status.status_code is StatusCode.UNSET
