"""Stages are timed while somebody measures, traced or not, and the loop's lag with them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from services.common import logs
from services.common.errors import SluiceError, invalid, unavailable
from services.common.observability import telemetry
from services.common.observability.instruments import expose, read
from services.common.observability.process_metrics import LAG_EVERY_S, ProcessMetrics


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
