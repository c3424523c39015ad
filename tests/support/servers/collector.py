"""An OTLP trace collector that keeps what it receives."""

from __future__ import annotations

from concurrent import futures
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as exported; ids are hex, parent is empty for a root, links are ids of spans."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    links: tuple[str, ...] = ()
    attributes: dict[str, object] = field(default_factory=dict, compare=False)
    events: tuple[str, ...] = ()
    resource: dict[str, str] = field(default_factory=dict, compare=False)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a free loopback port.

    Attributes:
        spans: in the order in which they came.
        metadata: of each export.
    """

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.metadata: list[dict[str, object]] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(  # the name is the protocol's
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.metadata.append(dict(context.invocation_metadata()))
        for resource in request.resource_spans:
            attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [
                    ReceivedSpan(
                        attributes["service.name"],
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        tuple(link.span_id.hex() for link in span.links),
                        {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes},
                        tuple(event.name for event in span.events),
                        attributes,
                    )
                    for span in scope.spans
                ]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace: str) -> list[ReceivedSpan]:
        """What came of one trace."""
        return [span for span in self.spans if span.trace == trace]

    def stop(self) -> None:
        """Ends it."""
        self._server.stop(None)


def env_of(endpoint: str) -> dict[str, str]:
    """Settings with which every service of a suite exports its traces there."""
    services = ("GATEWAY", "PREPROCESS", "ROUTER", "POSTPROCESS", "WORKER")
    return {f"SLUICE_{service}_OTLP_ENDPOINT": endpoint for service in services}
