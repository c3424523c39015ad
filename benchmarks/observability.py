"""Measures what metrics and traces cost: the same load on suites with and without them, in turns, in one run."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import grpc
import psutil
import typer
from drive import run_load
from load import Load
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from processes import own_suite, suite_of
from report import machine
from rich.console import Console
from rich.progress import track
from rich.table import Table

from services.common.net.ports import free_port

SERVICES = ("GATEWAY", "PREPROCESS", "ROUTER", "POSTPROCESS", "WORKER")
SCRAPE_EVERY_S = 15.0
DRAWS = 2000
OFF, METRICS, BOTH = "off", "metrics", "metrics, traces 1 %"

T = TypeVar("T")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans and counts them."""

    def __init__(self) -> None:
        self.spans = 0
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
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
    """Suites of one kind and what was measured on them: tokens a second, and CPU of all processes, µs a token.

    Lists of rounds, a list for each suite: two suites of a kind differ by more than two rounds of one.
    """

    name: str
    speed: list[list[float]] = field(default_factory=list)
    cpu: list[list[float]] = field(default_factory=list)

    def begin(self) -> None:
        """The next suite's rounds follow."""
        self.speed.append([])
        self.cpu.append([])

    def measure(self, url: str, load: Mapping[str, Any]) -> None:
        """One round."""
        where = urlsplit(url)
        assert where.port is not None
        processes = suite_of(where.port)
        spent: list[float] = []

        def look() -> None:
            spent.append(sum(cpu_s(process) for process in processes.values()))

        outcome = run_load(Load(host="127.0.0.1", port=where.port, seed=time.time_ns(), **load), 1, look, look)
        if outcome.errors:
            raise RuntimeError(f"{self.name}: {dict(outcome.errors)}")
        self.speed[-1].append(outcome.tokens / (outcome.ended - outcome.started))
        self.cpu[-1].append(1e6 * (spent[1] - spent[0]) / outcome.tokens)


def cpu_s(process: psutil.Process) -> float:
    """CPU time of a process and its children so far, to the nanosecond; the usual clock ticks every 10 ms."""
    tasks = (task for one in (process, *process.children(True)) for task in Path(f"/proc/{one.pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


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
    return {f"SLUICE_{service}_METRICS_LISTEN": f"127.0.0.1:{free_port()}" for service in SERVICES}


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
    suites: Annotated[int, typer.Option(min=1, help="how often suites are started anew")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="how often each suite is measured")] = 3,
    streams: Annotated[int, typer.Option(min=1, help="requests under way at once")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="requests a round")] = 640,
    tokens: Annotated[int, typer.Option(min=2, help="tokens of every answer")] = 128,
    words: Annotated[int, typer.Option(min=1, help="words of every prompt")] = 150,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Compare throughput with metrics and traces to throughput without."""
    load = {"model": "tekken", "streams": streams, "requests": requests, "tokens": tokens, "words": words, "warmup": 64}
    collector = Collector()
    variants = [Variant(name) for name in (OFF, METRICS, BOTH)]
    sizes: list[int] = []
    for number in track(range(suites), "suites", console=Console(stderr=True)):
        sizes += measured(variants, collector.endpoint, rounds, number, load)
    collector.stop()
    rows = figures(variants)
    if as_json:
        print(json.dumps({"machine": machine(), "load": load, "spans": collector.spans, "rows": rows}, indent=2))
    else:
        show(rows)
        print(
            f"{collector.spans} spans exported, {len(sizes)} scrapes of {statistics.mean(sizes or [0]) / 1024:.0f} KiB"
        )


def measured(
    variants: Sequence[Variant], collector: str, rounds: int, number: int, load: Mapping[str, Any]
) -> list[int]:
    """Starts a suite of each kind and measures them in turns; gives the sizes of what was scraped."""
    listening = {name: endpoints() for name in (METRICS, BOTH)}
    traces = {f"SLUICE_{service}_OTLP_ENDPOINT": collector for service in SERVICES}
    settings = {
        OFF: {"OTEL_SDK_DISABLED": "true"},
        METRICS: listening[METRICS],
        BOTH: {**listening[BOTH], **traces, "SLUICE_GATEWAY_TRACE_SAMPLE": "0.01"},
    }
    with ExitStack() as stack:
        running = []
        for variant in in_turn(variants, number):
            with environment(settings[variant.name]):
                running.append((variant, stack.enter_context(own_suite(1, 1000.0))))
            variant.begin()
        sizes = stack.enter_context(scraped([at for one in listening.values() for at in one.values()]))
        for turn in range(rounds):
            for variant, url in in_turn(running, turn):
                variant.measure(url, load)
    return sizes


def in_turn(things: Sequence[T], number: int) -> Sequence[T]:
    """All of them; each comes first, second and last equally often."""
    first = number % len(things)
    return (*things[first:], *things[:first])


def figures(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Medians over all rounds, and how each kind of suite compares to the first one, start by start."""
    off = variants[0]
    return [
        {
            "suite": variant.name,
            "tokens_per_s": statistics.median(chain(*variant.speed)),
            "throughput_change": change(variant.speed, off.speed),
            "cpu_us_per_token": statistics.median(chain(*variant.cpu)),
            "cpu_change": change(variant.cpu, off.cpu),
            "least_cpu_us_per_token": min(chain(*variant.cpu)),
        }
        for variant in variants
    ]


def change(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The mean change from `theirs`, and the bounds within which it lies with 90 % (suites drawn again and again).

    Means of logarithms: a round that something else disturbed counts as much upwards as downwards.
    """
    steps = [
        statistics.fmean(math.log(mine / other) for mine, other in zip(*rounds, strict=True))
        for rounds in zip(ours, theirs, strict=True)
    ]
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(steps, k=len(steps))) for _ in range(DRAWS))
    low, high = means[DRAWS // 20], means[-DRAWS // 20]
    return math.expm1(statistics.fmean(steps)), math.expm1(low), math.expm1(high)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints them."""
    table = Table("suite", "tokens/s", "change", "90 %", "CPU µs/token", "change", "90 %", "least")
    for row in rows:
        speed, cpu = row["throughput_change"], row["cpu_change"]
        table.add_row(
            row["suite"],
            f"{row['tokens_per_s']:,.0f}",
            f"{speed[0]:+.1%}",
            f"{speed[1]:+.1%} … {speed[2]:+.1%}",
            f"{row['cpu_us_per_token']:.1f}",
            f"{cpu[0]:+.1%}",
            f"{cpu[1]:+.1%} … {cpu[2]:+.1%}",
            f"{row['least_cpu_us_per_token']:.1f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    try:
        app()
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"observability.py: {error}")
