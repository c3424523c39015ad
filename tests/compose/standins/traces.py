"""A trace backend in memory: OTLP in on 4317, Jaeger's `/api/traces/ID` out on 16686."""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

SPANS: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps service and name of every span."""

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    SPANS[span.trace_id.hex()].append((attributes["service.name"], span.name))
        return trace_service_pb2.ExportTraceServiceResponse()


class Query(BaseHTTPRequestHandler):
    """One trace as Jaeger answers it."""

    def do_GET(self) -> None:
        spans = SPANS.get(self.path.rpartition("/")[2], [])
        services = sorted({service for service, _ in spans})
        trace = {
            "processes": {service: {"serviceName": service} for service in services},
            "spans": [{"operationName": name, "processID": service} for service, name in spans],
        }
        body = json.dumps({"data": [trace] if spans else []}).encode()
        self.send_response(200 if spans else 404)
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    server = grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Receiver(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port("0.0.0.0:4317")
    server.start()
    ThreadingHTTPServer(("0.0.0.0", 16686), Query).serve_forever()
