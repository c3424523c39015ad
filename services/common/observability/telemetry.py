"""OpenTelemetry wiring: a span per stage, one trace from HTTP to worker, metrics on a Prometheus endpoint.

Everything costs nothing while it is off: `stage` then hands out one shared null context, and instruments come from
the API's no-op meter. With metrics on, the same stages are timed (`on_stage`).
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

from services.common import logs, otel_environment
from services.common.errors import SluiceError
from services.common.observability import instruments
from services.common.observability.scrape_server import ScrapeEndpoint
from services.common.security.tls import metrics_context
from sluice.v1 import common_pb2

if TYPE_CHECKING:
    from services.common.observability.span_export import SpanExport
    from services.common.settings import ServiceSettings

log = logging.getLogger(__name__)

TRACEPARENT_LENGTH = 55
REQUEST_KEY = "sluice-request-id"
"""Metadata of a unary call: the id of the request that it is made for."""
NOT_RECORDED = f"00-{1:032x}-{1:016x}-00"
"""The traceparent of all traces that began here and were not drawn: nobody records them, so they need no names."""
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
"""Told the name, the seconds and the error of every stage that is over, when somebody measures stages."""

on_error: Callable[[SluiceError], None] | None = None
"""Told every typed error that a caller is answered with."""


def configure(service: str, settings: ServiceSettings) -> None:
    """Turns on what the settings ask for; call once, before instruments and spans are made.

    Nothing is turned on where OTEL_SDK_DISABLED is true, OpenTelemetry's own switch. Others of its variables give
    defaults, see `otel_environment`.

    Raises:
        SluiceError: FAILED_PRECONDITION, an address that is none.
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
    """Makes instruments real and exposes them in prometheus_client's default registry; see `configure`."""
    global _measuring
    if _disabled():
        return
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource

    # For libraries that measure by OpenTelemetry, and `target_info`; ours are in `instruments`.
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
    except Exception as error:  # what OpenTelemetry's exporter thinks of its variables must not stop a service
        log.error("traces are off, the exporter of %s cannot be made: %s", settings.otlp_endpoint, error)
        return
    _export = SpanExport(exporter, settings.otlp_endpoint)
    # `stage` and `start_span` draw before a span is made, so all of their spans are recorded. Foreign code in this
    # process, such as an engine, uses OpenTelemetry's global provider, which draws for the traces that begin there.
    own = TracerProvider(resource=resource, sampler=ALWAYS_ON)
    foreign = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(settings.trace_sample)))
    for provider in (own, foreign):
        provider.add_span_processor(_export)
    use_tracer_provider(own, settings.trace_sample)
    trace.set_tracer_provider(foreign)


def use_tracer_provider(provider: trace.TracerProvider, share: float = 1.0) -> None:
    """Turns tracing on with a given provider.

    Args:
        share: of the traces that begin here, 0 to 1. It is drawn before a span is made, because most are not.
    """
    global _tracer, _provider, _share
    _provider = provider
    _share = share
    _tracer = provider.get_tracer("sluice")


def shutdown() -> None:
    """Sends what is still buffered, within a bound."""
    for provider in (_provider, metrics.get_meter_provider()):
        stop = getattr(provider, "shutdown", None)
        if stop is not None:
            stop()


def tracing() -> bool:
    """Whether spans are recorded; ask before preparing their attributes."""
    return _tracer is not None


def spans() -> dict[str, int]:
    """Spans so far by what became of them; empty while none are exported."""
    if _export is None:
        return {}
    return {"exported": _export.exported, "failed": _export.failed, "dropped": _export.dropped}


def failed(error: SluiceError) -> None:
    """A caller is answered with a typed error."""
    if on_error is not None:
        on_error(error)


def stage(
    name: str, parent: Mapping[str, str] | None = None, kind: SpanKind = SpanKind.INTERNAL, **attributes: Any
) -> AbstractContextManager[Span | None]:
    """A span around a stage; errors mark it.

    Args:
        name: such as ``preprocess.tokenize``.
        parent: carrier with W3C headers of the caller; None continues the current span.
        attributes: of the span; None values are left out.
    """
    if _tracer is None and on_stage is None:
        return _OFF
    return _Stage(name, parent, kind, attributes)


class _Stage(AbstractContextManager["Span | None"]):
    """A span while tracing is on, and a duration while somebody measures."""

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
        context, recorded = _followed(self._parent)
        if not recorded:  # nothing will be recorded: no span is made, and what comes below knows as much
            self._token = None if context is None else otel_context.attach(context)
            return None
        kept = {key: value for key, value in self._attributes.items() if value is not None}
        span = self._span = _tracer.start_span(self._name, context=context, kind=self._kind, attributes=kept)
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
    """The caller's context. Most traces are not recorded: those are read in a tenth of the time."""
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


def _followed(parent: Mapping[str, str] | None) -> tuple[Context | None, bool]:
    """The context of what comes next, and whether it is recorded: the caller decided, or else it is drawn here."""
    context = None if parent is None else _context_of(parent)
    decided = trace.get_current_span(context).get_span_context()
    if decided.is_valid:
        return context, decided.trace_flags.sampled
    return (context, True) if random() < _share else (_NOT_RECORDED_CONTEXT, False)


def _name_request(span: Span, request: str) -> None:
    """Log lines about the request carry the ids of its span."""
    if request and span.is_recording():
        logs.traced(request, span.get_span_context())


def start_span(
    name: str,
    parent: Mapping[str, str] | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    links: Sequence[str] = (),
    **attributes: Any,
) -> Span | None:
    """A span its caller ends, for work that is not one block of code; None where nothing is recorded.

    Args:
        links: traceparents of spans it continues without being their child.
        attributes: of the span; `request_id` names the request in the log, too.
    """
    if _tracer is None:
        return None
    context, recorded = _followed(parent)
    if not recorded:
        return None
    kept = {key: value for key, value in attributes.items() if value is not None}
    found = [trace.get_current_span(_PROPAGATOR.extract({"traceparent": link})).get_span_context() for link in links]
    linked = [trace.Link(span_context) for span_context in found if span_context.is_valid]
    span = _tracer.start_span(name, context=context, kind=kind, attributes=kept, links=linked)
    _name_request(span, str(kept.get("request_id", "")))
    return span


def activate(span: Span | None) -> AbstractContextManager[None]:
    """Returns a block in which a span is the current one; tasks that are created in the block keep it.

    Args:
        span: from `start_span`; None: its trace is not recorded, and neither are spans that begin in the block.
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
    """W3C headers of the given or the current span; empty while tracing is off."""
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
    """Metadata of a unary call: it continues the current trace and names the request, as far as there are any."""
    request = logs.request_id.get()
    named = ((REQUEST_KEY, request),) if request.isascii() and request.isprintable() and request else ()
    return (*headers().items(), *named) or None


def trace_context(span: Span | None = None) -> common_pb2.TraceContext | None:
    """The same for a session message."""
    if _tracer is None:
        return None
    carrier = headers(span)
    return common_pb2.TraceContext(traceparent=carrier.get("traceparent", ""), tracestate=carrier.get("tracestate", ""))


def carrier(context: common_pb2.TraceContext) -> dict[str, str]:
    """Carrier of a session message's trace context, for `stage` and `start_span`."""
    found = {"traceparent": context.traceparent, "tracestate": context.tracestate}
    return {key: value for key, value in found.items() if value}


def carrier_of_metadata(metadata: Any) -> dict[str, str]:
    """Carrier of a unary call's metadata, for `stage`; cheap while tracing is off."""
    if _tracer is None:
        return {}
    return {key: value for key, value in metadata or () if key in ("traceparent", "tracestate")}


def name_request(metadata: Any) -> None:
    """Log lines of this call name the request that it is made for, if the caller said which."""
    for key, value in metadata or ():
        if key == REQUEST_KEY:
            logs.request_id.set(value)


def meter(service: str) -> metrics.Meter:
    """OpenTelemetry's, for what cannot be an instrument of the catalogue."""
    return metrics.get_meter(f"sluice.{service}")
