"""Spans leave by a thread of their own, within bounds, whatever the collector does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from services.common.observability.span_export import LAST_S, MOST_AT_ONCE, SpanExport


class Backend:
    """Takes spans, refuses them, fails or hangs."""

    def __init__(self) -> None:
        self.spans: list[str] = []
        self.largest = 0
        self.refuses = self.fails = False
        self.answers = threading.Event()
        self.answers.set()
        self.closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.largest = max(self.largest, len(spans))
        self.answers.wait()
        if self.fails:
            raise RuntimeError("broken")
        if self.refuses:
            return SpanExportResult.FAILURE
        self.spans += [span.name for span in spans]
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.closed = True


def record(export: SpanExport, number: int) -> None:
    provider = TracerProvider()
    provider.add_span_processor(export)
    tracer = provider.get_tracer("test")
    for index in range(number):
        tracer.start_span(f"span-{index}").end()


def awaited(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_span_arrives_once_in_batches() -> None:
    backend = Backend()
    export = SpanExport(backend, "here")
    record(export, 1500)
    export.shutdown()
    assert sorted(backend.spans) == sorted(f"span-{index}" for index in range(1500))
    assert backend.largest <= MOST_AT_ONCE
    assert (export.exported, export.failed, export.dropped) == (1500, 0, 0)
    assert backend.closed


def test_flushing_waits_for_what_is_under_way() -> None:
    backend = Backend()
    export = SpanExport(backend, "here")
    record(export, 3)
    assert export.force_flush(20_000)
    assert len(backend.spans) == 3
    export.shutdown()


def test_a_backend_that_hangs_costs_spans_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    backend = Backend()
    backend.answers.clear()
    export = SpanExport(backend, "here", most_waiting=100)
    record(export, 1)
    awaited(lambda: backend.largest == 1)  # the thread hangs now
    record(export, 10_000)
    assert export.dropped == 9_900, "what waits is bounded"
    assert not export.force_flush(50)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        export.shutdown()
    assert time.monotonic() - started < LAST_S + 10
    assert "no longer responds" in caplog.text
    backend.answers.set()


def test_export_failure_and_recovery_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    backend = Backend()
    export = SpanExport(backend, "http://collector:4317")
    with caplog.at_level(logging.INFO):
        for trouble in ("refuses", "fails"):
            setattr(backend, trouble, True)
            for _ in range(3):
                record(export, 1)
                assert export.force_flush(20_000)
        backend.refuses = backend.fails = False
        record(export, 2)
        assert export.force_flush(20_000)
    said = [line for line in caplog.messages if "collector" in line or "export recovered" in line]
    assert len(said) == 2
    assert "http://collector:4317 does not accept spans" in said[0]
    assert (export.exported, export.failed) == (2, 6)
    export.shutdown()


def test_what_is_not_sampled_is_not_exported() -> None:
    backend = Backend()
    export = SpanExport(backend, "here")
    provider = TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(export)
    provider.get_tracer("test").start_span("a").end()
    export.shutdown()
    assert backend.spans == []


def test_after_the_end_spans_are_dropped() -> None:
    export = SpanExport(Backend(), "here")
    export.shutdown()
    export.shutdown()
    record(export, 2)
    assert export.dropped == 2
