"""Stages are timed while somebody measures, traced or not, and the loop's lag with them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common import logs, telemetry
from services.common.errors import SluiceError, invalid, unavailable
from services.common.process_metrics import LAG_EVERY_S, ProcessMetrics


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> InMemoryMetricReader:
    found = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[found])
    monkeypatch.setattr(telemetry, "meter", lambda service: provider.get_meter(service))
    monkeypatch.setattr(telemetry, "_tracer", None)
    return found


@pytest.fixture
async def measured(reader: InMemoryMetricReader) -> Any:
    metrics = ProcessMetrics("router", asyncio.get_running_loop())
    metrics.start()
    yield metrics
    metrics.close()


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    assert telemetry.on_stage is None
    assert telemetry.on_error is None


def points(reader: InMemoryMetricReader, name: str) -> list[Any]:
    data = reader.get_metrics_data()
    return [
        point
        for resource in (data.resource_metrics if data is not None else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == f"sluice_process_{name}"
        for point in metric.data.data_points
    ]


async def test_stages_are_timed_with_their_outcome(measured: ProcessMetrics, reader: InMemoryMetricReader) -> None:
    with telemetry.stage("router.query") as span:
        assert span is None, "nothing is traced"
    with pytest.raises(SluiceError), telemetry.stage("router.query"):
        raise invalid("no")
    with pytest.raises(asyncio.CancelledError), telemetry.stage("router.query"):
        raise asyncio.CancelledError
    counted = {point.attributes["outcome"]: point.count for point in points(reader, "stage_seconds")}
    assert counted == {"ok": 1, "error": 1, "cancelled": 1}
    assert {point.attributes["stage"] for point in points(reader, "stage_seconds")} == {"router.query"}


async def test_a_stage_is_traced_and_timed_at_once(
    measured: ProcessMetrics, reader: InMemoryMetricReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("test"))
    with telemetry.stage("outer"), telemetry.stage("inner", tokens=3):
        pass
    assert [span.name for span in exporter.get_finished_spans()] == ["inner", "outer"]
    assert {point.attributes["stage"] for point in points(reader, "stage_seconds")} == {"inner", "outer"}


async def test_errors_and_lines_are_counted(measured: ProcessMetrics, reader: InMemoryMetricReader) -> None:
    telemetry.failed(unavailable("gone"))
    telemetry.failed(unavailable("gone"))
    logging.getLogger("services.x").warning("odd")
    logging.getLogger("services.x").error("bad")
    errors = {point.attributes["kind"]: point.value for point in points(reader, "errors") if point.value}
    assert errors == {"unavailable": 2}
    lines = {point.attributes["level"]: point.value for point in points(reader, "log_lines") if point.value}
    assert lines == {"warning": 1, "error": 1}


async def test_a_loop_that_is_kept_busy_lags(measured: ProcessMetrics, reader: InMemoryMetricReader) -> None:
    await asyncio.sleep(0)
    time.sleep(LAG_EVERY_S + 0.3)  # noqa: ASYNC251  what must not happen
    await asyncio.sleep(0.05)
    (point,) = points(reader, "event_loop_lag_seconds")
    assert point.max >= 0.3


async def test_what_the_process_is(measured: ProcessMetrics, reader: InMemoryMetricReader) -> None:
    (build,) = points(reader, "build_info")
    assert build.attributes["service"] == "router"
    assert build.attributes["version"]
    assert points(reader, "tasks")[0].value >= 1
    assert points(reader, "sessions")[0].value == 0


def test_lines_within_a_stage_carry_its_ids(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(telemetry, "_tracer", TracerProvider().get_tracer("test"))
    caplog.handler.setFormatter(logs.JsonFormatter("router"))
    with caplog.at_level(logging.INFO), telemetry.stage("router.query") as span:
        logging.getLogger("a").info("inside")
        assert span is not None
        context = span.get_span_context()
        assert f'"trace_id": "{context.trace_id:032x}"' in caplog.text
        assert f'"span_id": "{context.span_id:016x}"' in caplog.text
    caplog.clear()
    logging.getLogger("a").warning("outside", extra={"request": "r-1"})
    assert "trace_id" not in caplog.text
    assert '"request_id": "r-1"' in caplog.text
