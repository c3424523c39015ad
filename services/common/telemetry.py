"""OpenTelemetry wiring: a span per stage, one trace from HTTP to worker, metrics on a Prometheus endpoint.

Everything costs nothing while it is off: `stage` then hands out one shared null context, and instruments come from
the API's no-op meter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import metrics, propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from prometheus_client import start_http_server

from services.common.settings import ServiceSettings
from sluice.v1 import common_pb2

log = logging.getLogger(__name__)

_OFF: AbstractContextManager[None] = nullcontext()
_tracer: trace.Tracer | None = None
_provider: trace.TracerProvider | None = None


def configure(service: str, settings: ServiceSettings) -> None:
    """Turns on what the settings ask for; call once, before instruments and spans are made."""
    from opentelemetry.sdk.resources import Resource

    resource = Resource.create({"service.name": f"sluice-{service}"})
    if settings.otlp_endpoint:
        _configure_traces(resource, settings)
    if settings.metrics_listen:
        configure_metrics(resource)
        host, _, port = settings.metrics_listen.rpartition(":")
        start_http_server(int(port), addr=host or "127.0.0.1")
        log.info("metrics are served", extra={"address": settings.metrics_listen})


def configure_metrics(resource: Any = None) -> None:
    """Makes instruments real and exposes them in prometheus_client's default registry."""
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource

    metrics.set_meter_provider(
        MeterProvider(resource=resource or Resource.create({}), metric_readers=[PrometheusMetricReader()])
    )


def _configure_traces(resource: Any, settings: ServiceSettings) -> None:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    provider = TracerProvider(resource=resource, sampler=ParentBasedTraceIdRatio(settings.trace_sample))
    # A collector that hangs costs spans, never requests: export runs on its own thread with a bounded queue.
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.otlp_endpoint, timeout=5)))
    use_tracer_provider(provider)


def use_tracer_provider(provider: trace.TracerProvider) -> None:
    """Turns tracing on with a given provider."""
    global _tracer, _provider
    _provider = provider
    _tracer = provider.get_tracer("sluice")


def shutdown() -> None:
    """Flushes what is still buffered."""
    for provider in (_provider, metrics.get_meter_provider()):
        stop = getattr(provider, "shutdown", None)
        if stop is not None:
            stop()


def tracing() -> bool:
    """Whether spans are recorded; ask before preparing their attributes."""
    return _tracer is not None


def stage(
    name: str, parent: Mapping[str, str] | None = None, kind: SpanKind = SpanKind.INTERNAL, **attributes: Any
) -> AbstractContextManager[Span | None]:
    """A span around a stage; errors mark it.

    Args:
        name: such as ``preprocess.tokenize``.
        parent: carrier with W3C headers of the caller; None continues the current span.
        attributes: of the span; None values are left out.
    """
    return _OFF if _tracer is None else _stage(_tracer, name, parent, kind, attributes)


@contextmanager
def _stage(
    tracer: trace.Tracer, name: str, parent: Mapping[str, str] | None, kind: SpanKind, attributes: dict[str, Any]
) -> Iterator[Span]:
    context = propagate.extract(parent) if parent is not None else None
    kept = {key: value for key, value in attributes.items() if value is not None}
    with tracer.start_as_current_span(name, context=context, kind=kind, attributes=kept) as span:
        yield span


def start_span(
    name: str,
    parent: Mapping[str, str] | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    links: Sequence[str] = (),
    **attributes: Any,
) -> Span | None:
    """A span its caller ends, for work that is not one block of code; None while tracing is off.

    `links` are traceparents of spans it continues without being their child.
    """
    if _tracer is None:
        return None
    context = propagate.extract(parent) if parent is not None else None
    kept = {key: value for key, value in attributes.items() if value is not None}
    found = [trace.get_current_span(propagate.extract({"traceparent": link})).get_span_context() for link in links]
    linked = [trace.Link(span_context) for span_context in found if span_context.is_valid]
    return _tracer.start_span(name, context=context, kind=kind, attributes=kept, links=linked)


def fail_span(span: Span, message: str) -> None:
    """Marks a span as failed."""
    span.set_status(Status(StatusCode.ERROR, message))


def headers(span: Span | None = None) -> dict[str, str]:
    """W3C headers of the given or the current span; empty while tracing is off."""
    if _tracer is None:
        return {}
    carrier: dict[str, str] = {}
    context = trace.set_span_in_context(span) if span is not None else otel_context.get_current()
    propagate.inject(carrier, context=context)
    return carrier


def grpc_metadata() -> Sequence[tuple[str, str]] | None:
    """Metadata that continues the current trace in a unary call; None while tracing is off."""
    return tuple(headers().items()) if _tracer is not None else None


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


def watch_tasks(service: str, loop: asyncio.AbstractEventLoop) -> None:
    """A gauge of the event loop's tasks: what leaks there shows."""

    def observe(options: metrics.CallbackOptions) -> Iterator[metrics.Observation]:
        yield metrics.Observation(len(asyncio.all_tasks(loop)))

    meter(service).create_observable_gauge(f"sluice_{service}_tasks", [observe], description="tasks of the event loop")


def meter(service: str) -> metrics.Meter:
    """The meter for a service's instruments; names start with ``sluice_<service>_``."""
    return metrics.get_meter(f"sluice.{service}")
