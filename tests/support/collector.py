"""An OTLP trace collector that keeps what it receives."""

from __future__ import annotations

from concurrent import futures
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as exported; ids are hex, parent is empty for a root."""

    service: str
    name: str
    trace: str
    span: str
    parent: str


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a free loopback port."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(  # the name is the protocol's
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
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
                    )
                    for span in scope.spans
                ]
        return trace_service_pb2.ExportTraceServiceResponse()

    def stop(self) -> None:
        """Ends it."""
        self._server.stop(None)
