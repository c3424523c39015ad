"""A service process that is told by OpenTelemetry's own variables where its traces go, and how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.servers.collector import Collector
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    started = Collector()
    yield started
    started.stop()


@contextmanager
def router(*flags: str, **env: str) -> Iterator[tuple[str, list[str]]]:
    """A router process; its address and its log lines so far."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "SLUICE_"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "services.router", "--listen", "127.0.0.1:0", "--log-format", "json", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**clean, **env},
    )
    assert process.stderr is not None
    lines: list[str] = []
    address = ""
    for line in process.stderr:
        lines.append(line)
        if "gRPC server listens" in line:
            address = json.loads(line)["address"]
            break
    reader = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        assert address, "".join(lines)
        yield address, lines
    finally:
        process.terminate()
        process.wait(20)
        reader.join(5)


def ask(address: str) -> None:
    """One call, whatever its answer is."""
    with grpc.insecure_channel(address) as channel:
        router_pb2_grpc.RouterStub(channel).GetDecisions(
            router_pb2.GetDecisionsRequest(), timeout=30, wait_for_ready=True
        )


def until_exported(collector: Collector, service: str) -> None:
    wait_until(lambda: any(span.service == service for span in collector.spans), 30)


def test_service_exports_as_the_variables_ask(collector: Collector) -> None:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-api-key=hunter2%3D,malformed-hunter2",
        "OTEL_SERVICE_NAME": "shop-llm",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=staging,service.name=unused",
        "OTEL_TRACES_SAMPLER": "parentbased_always_on",
        "OTEL_PROPAGATORS": "tracecontext,b3",
    }
    with router(**env) as (address, lines):
        ask(address)
        until_exported(collector, "shop-llm")
    (span,) = [span for span in collector.spans if span.service == "shop-llm"]
    assert span.name == "router.decisions"
    assert (span.resource["deployment.environment.name"], span.resource["sluice.service"]) == ("staging", "router")
    assert collector.metadata[-1]["x-api-key"] == "hunter2="
    warned = [json.loads(line)["message"] for line in lines if '"warning"' in line]
    assert [message.split(" ")[0].rstrip(":") for message in warned] == [
        "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_PROPAGATORS",
    ]  # fmt: skip
    assert not any("hunter2" in line for line in lines), "headers are secrets"


def test_flags_count_before_the_variables(collector: Collector) -> None:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_TRACES_SAMPLER": "always_off",
        "OTEL_RESOURCE_ATTRIBUTES": "service.name=flagged",
    }
    with router("--otlp-endpoint", collector.endpoint, "--trace-sample", "1", **env) as (address, _):
        ask(address)
        until_exported(collector, "flagged")


def test_another_protocol_is_a_warning_and_the_service_goes_on(collector: Collector) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}
    with router(**env) as (address, lines):
        ask(address)
        (warned,) = [json.loads(line)["message"] for line in lines if '"warning"' in line]
    assert warned.startswith("Traces are off: OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'")


def test_a_variable_that_the_exporter_refuses_is_an_error_line_and_the_service_goes_on(collector: Collector) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_EXPORTER_OTLP_COMPRESSION": "brotli"}
    with router(**env) as (address, lines):
        ask(address)
        (said,) = [json.loads(line) for line in lines if '"error"' in line]
    assert said["message"].startswith("traces are off")
    assert "brotli" in said["message"]


def test_disabled_sdk_exports_nothing(collector: Collector) -> None:
    env = {
        "OTEL_SDK_DISABLED": "true",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
        "OTEL_TRACES_SAMPLER": "always_on",
        "OTEL_SERVICE_NAME": "disabled",
    }
    with router(**env) as (address, _):
        ask(address)
    assert not any(span.service == "disabled" for span in collector.spans), "the process has ended and sent nothing"
