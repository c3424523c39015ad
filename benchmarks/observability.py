"""Measures what metrics and traces cost: the same load on suites with and without them, in turns, in one run."""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

import grpc
import typer
from drive import run_load
from load import Load
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from processes import cpu_seconds, own_suite, suite_of
from report import machine
from rich.console import Console
from rich.table import Table

SERVICES = ("GATEWAY", "PREPROCESS", "ROUTER", "POSTPROCESS", "WORKER")
SCRAPE_EVERY_S = 15.0
OFF, METRICS, BOTH = "off", "metrics", "metrics, traces 1 %"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans and counts them."""

    def __init__(self) -> None:
        self.spans = 0
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(  # the name is the protocol's
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.spans += sum(len(scope.spans) for one in request.resource_spans for scope in one.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def stop(self) -> None:
        """Ends it."""
        self._server.stop(None)


@dataclass
class Variant:
    """A suite and what was measured on it: tokens a second, and CPU of all its processes, µs a token."""

    name: str
    url: str
    speed: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self, load: Mapping[str, Any]) -> None:
        """One round."""
        where = urlsplit(self.url)
        assert where.port is not None
        processes = suite_of(where.port)
        spent: list[float] = []

        def look() -> None:
            spent.append(sum(cpu_seconds(processes).values()))

        outcome = run_load(Load(host="127.0.0.1", port=where.port, seed=time.time_ns(), **load), 1, look, look)
        if outcome.errors:
            raise RuntimeError(f"{self.name}: {dict(outcome.errors)}")
        self.speed.append(outcome.tokens / (outcome.ended - outcome.started))
        self.cpu.append(1e6 * (spent[1] - spent[0]) / outcome.tokens)


@contextmanager
def environment(more: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def endpoints() -> dict[str, str]:
    """A metrics endpoint for each service."""
    with ExitStack() as stack:
        probes = {service: stack.enter_context(socket.socket()) for service in SERVICES}
        for probe in probes.values():
            probe.bind(("127.0.0.1", 0))
        return {
            f"SLUICE_{service}_METRICS_LISTEN": f"127.0.0.1:{probe.getsockname()[1]}"
            for service, probe in probes.items()
        }


@contextmanager
def scraped(addresses: Sequence[str]) -> Iterator[list[int]]:
    """Scrapes as Prometheus would; gives the sizes of the answers."""
    sizes: list[int] = []
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(SCRAPE_EVERY_S):
            for address in addresses:
                with suppress(OSError), urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
                    sizes.append(len(answer.read()))

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield sizes
    finally:
        over.set()
        thread.join(10)


@app.command()
def observability(
    rounds: Annotated[int, typer.Option(min=1, help="how often each suite is measured")] = 7,
    streams: Annotated[int, typer.Option(min=1, help="requests under way at once")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="requests a round")] = 640,
    tokens: Annotated[int, typer.Option(min=2, help="tokens of every answer")] = 128,
    words: Annotated[int, typer.Option(min=1, help="words of every prompt")] = 150,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Compare throughput with metrics and traces to throughput without."""
    load = {"model": "tekken", "streams": streams, "requests": requests, "tokens": tokens, "words": words, "warmup": 64}
    collector = Collector()
    listening = {name: endpoints() for name in (METRICS, BOTH)}
    traces = {f"SLUICE_{service}_OTLP_ENDPOINT": collector.endpoint for service in SERVICES}
    settings = {
        OFF: {"OTEL_SDK_DISABLED": "true"},
        METRICS: listening[METRICS],
        BOTH: {**listening[BOTH], **traces, "SLUICE_GATEWAY_TRACE_SAMPLE": "0.01"},
    }
    variants = []
    with ExitStack() as suites:
        for name, more in settings.items():
            with environment(more):
                variants.append(Variant(name, suites.enter_context(own_suite(1, 1000.0))))
        sizes = suites.enter_context(scraped([at for one in listening.values() for at in one.values()]))
        for number in range(rounds):
            turn = number % len(variants)  # each comes first, second and last equally often
            for variant in (*variants[turn:], *variants[:turn]):
                variant.measure(load)
    collector.stop()
    rows = figures(variants)
    if as_json:
        print(json.dumps({"machine": machine(), "load": load, "spans": collector.spans, "rows": rows}, indent=2))
    else:
        show(rows)
        print(
            f"{collector.spans} spans exported, {len(sizes)} scrapes of {statistics.mean(sizes or [0]) / 1024:.0f} KiB"
        )


def figures(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Medians over the rounds, each compared to the round without of the same turn; and the best rounds, which on a
    machine that does other work too say more."""
    off = variants[0]
    rows = []
    for variant in variants:
        speed = [ours / theirs - 1 for ours, theirs in zip(variant.speed, off.speed, strict=True)]
        cpu = [ours / theirs - 1 for ours, theirs in zip(variant.cpu, off.cpu, strict=True)]
        rows.append(
            {
                "suite": variant.name,
                "tokens_per_s": statistics.median(variant.speed),
                "cpu_us_per_token": statistics.median(variant.cpu),
                "throughput_change": statistics.median(speed),
                "cpu_change": statistics.median(cpu),
                "rounds": [min(speed), max(speed)],
                "best_tokens_per_s": max(variant.speed),
                "least_cpu_us_per_token": min(variant.cpu),
                "best_throughput_change": max(variant.speed) / max(off.speed) - 1,
                "least_cpu_change": min(variant.cpu) / min(off.cpu) - 1,
            }
        )
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints them."""
    table = Table("suite", "tokens/s", "change", "of rounds", "best round", "CPU µs/token", "change", "least", "change")
    for row in rows:
        worst, best = row["rounds"]
        table.add_row(
            row["suite"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['throughput_change']:+.1%}",
            f"{worst:+.0%} … {best:+.0%}",
            f"{row['best_tokens_per_s']:,.0f} ({row['best_throughput_change']:+.1%})",
            f"{row['cpu_us_per_token']:.1f}",
            f"{row['cpu_change']:+.1%}",
            f"{row['least_cpu_us_per_token']:.1f}",
            f"{row['least_cpu_change']:+.1%}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    try:
        app()
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"observability.py: {error}")
