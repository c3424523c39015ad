"""Export of spans, and OpenTelemetry's environment variables."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from services.common.observability.span_export import LAST_S, MAX_AT_ONCE, SpanExport
from services.common.settings.otel_environment import read
from services.common.settings.service import GrpcServiceSettings, ServiceSettings, settings_config
from tests.support.waiting import wait_until


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


def test_every_span_arrives_once_in_batches() -> None:
    backend = Backend()
    export = SpanExport(backend, "here")
    record(export, 1500)
    export.shutdown()
    assert sorted(backend.spans) == sorted(f"span-{index}" for index in range(1500))
    assert backend.largest <= MAX_AT_ONCE
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
    wait_until(lambda: backend.largest == 1)  # the thread hangs now
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


ENDPOINT = "http://collector:4317"


class RoutedSettings(GrpcServiceSettings):
    """A service behind the gateway."""

    model_config = settings_config("routed")


class FrontSettings(ServiceSettings):
    """The gateway."""

    model_config = settings_config("front")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL", "HEADERS", "TRACES_HEADERS"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name in ("TRACES_SAMPLER", "TRACES_SAMPLER_ARG", "TRACES_EXPORTER", "PROPAGATORS"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)


def test_endpoint_of_the_variables_is_the_default_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RoutedSettings.load([]).otlp_endpoint == ""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", ENDPOINT)
    assert RoutedSettings.load([]).otlp_endpoint == FrontSettings.load([]).otlp_endpoint == ENDPOINT
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:4317")
    assert RoutedSettings.load([]).otlp_endpoint == "http://traces:4317"
    monkeypatch.setenv("SLUICE_ROUTED_OTLP_ENDPOINT", "http://own:4317")
    assert RoutedSettings.load([]).otlp_endpoint == "http://own:4317"
    assert RoutedSettings.load(["--otlp-endpoint", "http://flag:4317"]).otlp_endpoint == "http://flag:4317"
    assert RoutedSettings.load(["--otlp-endpoint", ""]).otlp_endpoint == "", "an empty setting turns traces off"


@pytest.mark.parametrize(
    ("sampler", "arg", "share"),
    [
        ("always_on", "", 1.0),
        ("always_off", "", 0.0),
        ("traceidratio", "0.25", 0.25),
        ("parentbased_traceidratio", "0.25", 0.25),
        ("parentbased_traceidratio", "", 1.0),
        ("parentbased_always_on", "0.5", 1.0),
        ("parentbased_always_off", "", 0.0),
        ("traceidratio", "2", 1.0),
        ("traceidratio", "many", 1.0),
    ],
)
def test_sampler_of_the_variables_is_the_default_share(
    monkeypatch: pytest.MonkeyPatch, sampler: str, arg: str, share: float
) -> None:
    assert (RoutedSettings.load([]).trace_sample, FrontSettings.load([]).trace_sample) == (0.0, 1.0)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", arg)
    assert RoutedSettings.load([]).trace_sample == FrontSettings.load([]).trace_sample == share
    assert RoutedSettings.load(["--trace-sample", "0.5"]).trace_sample == 0.5


def test_unknown_sampler_leaves_the_setting_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "xray")
    assert (RoutedSettings.load([]).trace_sample, FrontSettings.load([]).trace_sample) == (0.0, 1.0)
    (problem,) = read({"OTEL_TRACES_SAMPLER": "xray"}).problems
    assert "'xray'" in problem
    assert "--trace-sample" in problem


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_another_protocol_than_grpc_turns_traces_off_and_is_reported(name: str) -> None:
    found = read({"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT, name: "http/protobuf"})
    assert found.endpoint == ""
    assert name in found.off
    assert "'http/protobuf'" in found.off
    assert "--otlp-endpoint" in found.off
    assert read({"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT, name: "grpc"}).endpoint == ENDPOINT
    assert read({name: "http/protobuf"}).off == "", "the variables name no collector"


def test_protocol_of_the_variables_does_not_touch_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert RoutedSettings.load([]).otlp_endpoint == ""
    assert RoutedSettings.load(["--otlp-endpoint", ENDPOINT]).otlp_endpoint == ENDPOINT


def test_no_exporter_is_off_without_a_problem() -> None:
    found = read({"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT, "OTEL_TRACES_EXPORTER": "none"})
    assert (found.endpoint, found.off, found.problems) == ("", "", ())
    (problem,) = read({"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT, "OTEL_TRACES_EXPORTER": "zipkin"}).problems
    assert "'zipkin'" in problem


def test_headers_are_decoded_and_malformed_ones_never_repeated() -> None:
    good = "Authorization=Bearer%20abc, x-team = search "
    text = f"{good},broken-hunter2,=hunter2,x y=hunter2,x-name=gr%C3%BC%C3%9Fe-hunter2"
    found = read({"OTEL_EXPORTER_OTLP_HEADERS": text})
    assert found.headers == (("authorization", "Bearer abc"), ("x-team", "search"))
    assert len(found.problems) == 4
    assert "hunter2" not in " ".join(found.problems)
    assert "Bearer" not in repr(found)
    both = {"OTEL_EXPORTER_OTLP_HEADERS": "a=1", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "b=2"}
    assert read(both).headers == (("b", "2"),)


def test_other_propagators_than_tracecontext_are_reported() -> None:
    assert read({"OTEL_PROPAGATORS": "tracecontext"}).problems == ()
    (problem,) = read({"OTEL_PROPAGATORS": "tracecontext,baggage,b3multi"}).problems
    assert "baggage, b3multi" in problem
