"""OpenTelemetry wiring: one span per stage, one trace from HTTP to worker, metrics on a Prometheus endpoint.

While it is off it costs nothing: `stage` returns a shared null context. With metrics on, stages are also timed
(`on_stage`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Token
from random import random
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.common.base import logs
from services.common.base.errors import SluiceError
from services.common.observability import instruments
from services.common.observability.scrape_server import ScrapeEndpoint
from services.common.security.tls import metrics_context
from services.common.settings import otel_environment
from sluice.v1 import common_pb2

if TYPE_CHECKING:
    from services.common.observability.span_export import SpanExport
    from services.common.settings.service import ServiceSettings

log = logging.getLogger(__name__)

TRACEPARENT_LENGTH = 55
REQUEST_KEY = "sluice-request-id"
"""Metadata key of a unary call: the id of the request it belongs to."""
NOT_RECORDED = f"00-{1:032x}-{1:016x}-00"
"""The traceparent of every trace that starts here and is not sampled; it is never recorded, so one id suffices."""
_PROPAGATOR = TraceContextTextMapPropagator()
_NOT_RECORDED_SPAN = NonRecordingSpan(SpanContext(1, 1, True, TraceFlags(0)))
_NOT_RECORDED_CONTEXT = trace.set_span_in_context(_NOT_RECORDED_SPAN, Context())
_OFF: AbstractContextManager[None] = nullcontext()
_tracer: trace.Tracer | None = None
_provider: trace.TracerProvider | None = None
_endpoint: ScrapeEndpoint | None = None
_export: SpanExport | None = None
_measuring = False
_share = 1.0

on_stage: Callable[[str, float, BaseException | None], None] | None = None
"""Called with the name, seconds and error of every completed stage, while stages are measured."""

on_error: Callable[[SluiceError], None] | None = None
"""Called with every typed error returned to a caller."""


def configure(service: str, settings: ServiceSettings) -> None:
    """Turns on the telemetry that the settings enable; call once, before instruments and spans are created.

    Does nothing when OTEL_SDK_DISABLED is true. Other OpenTelemetry variables provide defaults, see `otel_environment`.

    Raises:
        SluiceError: FAILED_PRECONDITION for an invalid address.
    """
    global _endpoint
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    if _disabled():
        return
    given = OTELResourceDetector().detect().attributes  # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
    name = given.get("service.name") or f"sluice-{service}"
    resource = Resource.create({"service.name": name, "sluice.service": service})
    variables = otel_environment.read(os.environ)
    if settings.otlp_endpoint:
        for problem in variables.problems:
            log.warning("%s", problem)
        _configure_traces(resource, settings, variables.headers)
    elif variables.off:
        log.warning("%s", variables.off)
    if settings.metrics_listen:
        _endpoint = ScrapeEndpoint(settings.metrics_listen, metrics_context(settings) if settings.metrics_tls else None)
        configure_metrics(resource)
        _endpoint.start()


def configure_metrics(resource: Any = None) -> None:
    """Turns on metrics and exposes them in prometheus_client's default registry; see `configure`."""
    global _measuring
    if _disabled():
        return
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource

    # For libraries that record OpenTelemetry metrics, and `target_info`; ours are in `instruments`.
    provider = MeterProvider(resource=resource or Resource.create({}), metric_readers=[PrometheusMetricReader()])
    metrics.set_meter_provider(provider)
    instruments.expose()
    _measuring = True


def _disabled() -> bool:
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def measuring() -> bool:
    """Whether metrics are on."""
    return _measuring


def _configure_traces(resource: Any, settings: ServiceSettings, headers: Sequence[tuple[str, str]]) -> None:
    global _export
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased

    from services.common.observability.span_export import SpanExport, otlp_exporter

    try:
        exporter = otlp_exporter(settings.otlp_endpoint, headers)
    except Exception as error:  # invalid exporter variables must not stop a service
        log.error("traces are off: the exporter for %s cannot be created: %s", settings.otlp_endpoint, error)
        return
    _export = SpanExport(exporter, settings.otlp_endpoint)
    # `stage` and `start_span` sample before they create a span, so all their spans are recorded. Other code in this
    # process, such as an engine, uses OpenTelemetry's global provider, which samples the traces that start there.
    own = TracerProvider(resource=resource, sampler=ALWAYS_ON)
    foreign = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(settings.trace_sample)))
    for provider in (own, foreign):
        provider.add_span_processor(_export)
    use_tracer_provider(own, settings.trace_sample)
    trace.set_tracer_provider(foreign)


def use_tracer_provider(provider: trace.TracerProvider, share: float = 1.0) -> None:
    """Turns tracing on with a given provider.

    Args:
        share: sampled share of the traces that start here, 0 to 1. Sampling precedes span creation, since most traces
            are not recorded.
    """
    global _tracer, _provider, _share
    _provider = provider
    _share = share
    _tracer = provider.get_tracer("sluice")


def shutdown() -> None:
    """Sends buffered spans, within a time limit."""
    for provider in (_provider, metrics.get_meter_provider()):
        stop = getattr(provider, "shutdown", None)
        if stop is not None:
            stop()


def tracing() -> bool:
    """Whether spans are recorded; check before preparing their attributes."""
    return _tracer is not None


def spans() -> dict[str, int]:
    """Returns the number of spans so far by outcome; empty while none are exported."""
    if _export is None:
        return {}
    return {"exported": _export.exported, "failed": _export.failed, "dropped": _export.dropped}


def failed(error: SluiceError) -> None:
    """Reports a typed error that is returned to a caller."""
    if on_error is not None:
        on_error(error)


def stage(
    name: str, parent: Mapping[str, str] | None = None, kind: SpanKind = SpanKind.INTERNAL, **attributes: Any
) -> AbstractContextManager[Span | None]:
    """Returns a context that records a span around a stage and marks it as failed on errors.

    Args:
        name: such as ``preprocess.tokenize``.
        parent: carrier with the caller's W3C headers; None continues the current span.
        attributes: span attributes; None values are omitted.
    """
    if _tracer is None and on_stage is None:
        return _OFF
    return _Stage(name, parent, kind, attributes)


class _Stage(AbstractContextManager["Span | None"]):
    """Records a span while tracing is on, and a duration while stages are measured."""

    __slots__ = ("_attributes", "_kind", "_name", "_parent", "_span", "_started_s", "_token")

    def __init__(self, name: str, parent: Mapping[str, str] | None, kind: SpanKind, attributes: dict[str, Any]) -> None:
        self._name = name
        self._parent = parent
        self._kind = kind
        self._attributes = attributes
        self._span: Span | None = None
        self._token: Token[Context] | None = None

    def __enter__(self) -> Span | None:
        self._started_s = perf_counter()
        if _tracer is None:
            return None
        context, recorded = _sampled(self._parent)
        if not recorded:  # create no span, and propagate the decision to nested stages
            self._token = None if context is None else otel_context.attach(context)
            return None
        given = {key: value for key, value in self._attributes.items() if value is not None}
        span = self._span = _tracer.start_span(self._name, context=context, kind=self._kind, attributes=given)
        self._token = otel_context.attach(trace.set_span_in_context(span, context))
        _name_request(span, logs.request_id.get())
        return span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if on_stage is not None:
            on_stage(self._name, perf_counter() - self._started_s, error)
        if self._span is not None:
            if isinstance(error, Exception):
                self._span.record_exception(error)
                fail_span(self._span, f"{type(error).__name__}: {error}")
            self._span.end()
        if self._token is not None:
            otel_context.detach(self._token)


def _context_of(carrier: Mapping[str, str]) -> Context:
    """Returns the caller's context; has a fast path for traces that are not recorded, which most are."""
    header = carrier.get("traceparent", "")
    if header == NOT_RECORDED:
        return _NOT_RECORDED_CONTEXT
    if len(header) == TRACEPARENT_LENGTH and header.startswith("00-"):
        try:
            _, trace_id, span_id, flags = header.split("-")
            caller = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))
        except ValueError:
            return _PROPAGATOR.extract(carrier)
        if not caller.trace_flags.sampled and caller.is_valid:
            return trace.set_span_in_context(NonRecordingSpan(caller), Context())
    return _PROPAGATOR.extract(carrier)


def _sampled(parent: Mapping[str, str] | None) -> tuple[Context | None, bool]:
    """Returns the context for a new span and whether it is recorded: by the caller's decision, else by sampling."""
    context = None if parent is None else _context_of(parent)
    decided = trace.get_current_span(context).get_span_context()
    if decided.is_valid:
        return context, decided.trace_flags.sampled
    return (context, True) if random() < _share else (_NOT_RECORDED_CONTEXT, False)


def _name_request(span: Span, request: str) -> None:
    """Adds the span's ids to the log lines of the request."""
    if request and span.is_recording():
        logs.traced(request, span.get_span_context())


def start_span(
    name: str,
    parent: Mapping[str, str] | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    links: Sequence[str] = (),
    **attributes: Any,
) -> Span | None:
    """Starts a span that the caller ends, for work that is not one block of code; returns None when it is not recorded.

    Args:
        links: traceparents of spans it continues without being their child.
        attributes: span attributes; `request_id` also identifies the request in log lines.
    """
    if _tracer is None:
        return None
    context, recorded = _sampled(parent)
    if not recorded:
        return None
    given = {key: value for key, value in attributes.items() if value is not None}
    linked = [trace.get_current_span(_PROPAGATOR.extract({"traceparent": link})).get_span_context() for link in links]
    span_links = [trace.Link(span_context) for span_context in linked if span_context.is_valid]
    span = _tracer.start_span(name, context=context, kind=kind, attributes=given, links=span_links)
    _name_request(span, str(given.get("request_id", "")))
    return span


def activate(span: Span | None) -> AbstractContextManager[None]:
    """Returns a context in which a span is the current one; tasks created inside inherit it.

    Args:
        span: from `start_span`; None: its trace is not recorded, and neither are spans started inside.
    """
    return _OFF if _tracer is None else _active(span or _NOT_RECORDED_SPAN)


@contextmanager
def _active(span: Span) -> Iterator[None]:
    token = otel_context.attach(trace.set_span_in_context(span))
    try:
        yield
    finally:
        otel_context.detach(token)


def fail_span(span: Span, message: str) -> None:
    """Marks a span as failed."""
    span.set_status(Status(StatusCode.ERROR, message))


def headers(span: Span | None = None) -> dict[str, str]:
    """Returns the W3C headers of the given or the current span; empty while tracing is off."""
    if _tracer is None:
        return {}
    current = span or trace.get_current_span()
    if current is _NOT_RECORDED_SPAN:
        return {"traceparent": NOT_RECORDED}
    context = current.get_span_context()
    if not context.is_valid:
        return {}
    carrier = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
    if context.trace_state:
        carrier["tracestate"] = context.trace_state.to_header()
    return carrier


def grpc_metadata() -> Sequence[tuple[str, str]] | None:
    """Returns the metadata of a unary call: the current trace and the request id, if any."""
    request = logs.request_id.get()
    named = ((REQUEST_KEY, request),) if request and request.isascii() and request.isprintable() else ()
    return named or None if _tracer is None else (*headers().items(), *named) or None


def trace_context(span: Span | None = None) -> common_pb2.TraceContext | None:
    """Returns the trace context of a session message; None while tracing is off."""
    if _tracer is None:
        return None
    carrier = headers(span)
    return common_pb2.TraceContext(traceparent=carrier.get("traceparent", ""), tracestate=carrier.get("tracestate", ""))


def carrier(context: common_pb2.TraceContext) -> dict[str, str]:
    """Returns the carrier of a session message's trace context, for `stage` and `start_span`."""
    fields = {"traceparent": context.traceparent, "tracestate": context.tracestate}
    return {key: value for key, value in fields.items() if value}


def carrier_of_metadata(metadata: Any) -> dict[str, str]:
    """Returns the carrier of a unary call's metadata, for `stage`; cheap while tracing is off."""
    if _tracer is None:
        return {}
    return {key: value for key, value in metadata or () if key in ("traceparent", "tracestate")}


def carrier_of_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the carrier of an HTTP request's headers, for `stage`; cheap while tracing is off."""
    if _tracer is None:
        return {}
    return {name: value for name in ("traceparent", "tracestate") if (value := headers.get(name)) is not None}


def name_request(metadata: Any) -> None:
    """Sets the request id of this call's log lines from the metadata, if present."""
    for key, value in metadata or ():
        if key == REQUEST_KEY:
            logs.request_id.set(value)
