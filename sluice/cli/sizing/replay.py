"""`sluice advise --replay`: what autoscalers make of a trace, in virtual time: worker hours and requests in time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sluice.cli.errors import BadFlag
from sluice.cli.sizing.autoscalers import Autoscaler, Fixed, HpaOnCpu, HpaOnQueue, SluiceRule, WorkerBounds
from sluice.cli.sizing.line_plot import Panel, plot
from sluice.cli.sizing.trace import TracedRequest, read_trace
from sluice.cli.sizing.virtual_fleet import FleetOutcome, VirtualFleet
from sluice.cli.sizing.virtual_worker import WorkerShape

COLOURS = {"sluice": "#0b6e4f", "HPA on CPU": "#c1666b", "HPA on queue": "#48639c", "fixed": "#8a8a8a"}
MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Replay:
    """What to replay, on which workers, and what counts as in time.

    Attributes:
        startup_s: seconds from the start of a worker until it receives requests.
        ttft_s: seconds from arrival to first token of a request in time.
        inter_token_ms: milliseconds from one token to the next of a request in time, on average.
        cpu_target: share of a core that HPA on CPU aims at.
        queue_target: waiting requests a worker that HPA on queue aims at.
        copies: how often each request of the trace is sent.
    """

    trace: Path
    startup_s: float = 120.0
    ttft_s: float = 2.0
    inter_token_ms: float = 50.0
    min_workers: int = 1
    max_workers: int = 16
    cpu_target: float = 0.8
    queue_target: float = 5.0
    copies: int = 1
    shape: WorkerShape = field(default_factory=WorkerShape)

    def check(self) -> None:
        """Raises BadFlag for a number that makes no sense."""
        numbers = {name: getattr(self, name) for name in ("ttft_s", "inter_token_ms", "cpu_target", "queue_target")}
        numbers |= {"min_workers": self.min_workers, "max_workers": self.max_workers, "copies": self.copies}
        for name, value in {**numbers, **asdict(self.shape)}.items():
            if not (math.isfinite(value) and value > 0):
                raise BadFlag(f"--{name.replace('_', '-')} is {value:g}; it must be a number above 0")
        if not (math.isfinite(self.startup_s) and self.startup_s >= 0):
            raise BadFlag(f"--startup-s is {self.startup_s:g}; it must be a number of at least 0")
        if self.max_workers < self.min_workers:
            raise BadFlag(f"--max-workers is {self.max_workers}, less than --min-workers, {self.min_workers}")


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """What one autoscaler made of the trace.

    Attributes:
        within_objective: share of the requests whose TTFT and inter-token time were in time.
        ttft_s: p50, p95 and p99.
        inter_token_ms: p50, p95 and p99 of the requests' means.
    """

    autoscaler: str
    requests: int
    worker_hours: float
    within_objective: float
    ttft_s: Mapping[str, float]
    inter_token_ms: Mapping[str, float]
    most_workers: int
    started: int


def replay(question: Replay) -> tuple[Sequence[ReplayRow], Mapping[str, FleetOutcome]]:
    """Returns a row for each autoscaler, and what it comes from.

    Raises:
        BadFlag: the trace has no requests, a request exceeds a worker's cache, or a number makes no sense.
    """
    question.check()
    requests = read_trace(question.trace, question.copies)
    _check_sizes(requests, question.shape)
    bounds = WorkerBounds(question.min_workers, question.max_workers)
    outcomes = {}
    for autoscaler in _autoscalers(question, bounds):
        fleet = VirtualFleet(requests, autoscaler, question.shape, bounds, question.startup_s)
        outcomes[autoscaler.name] = fleet.run()
    return [_row(name, outcome, question) for name, outcome in outcomes.items()], outcomes


def _autoscalers(question: Replay, bounds: WorkerBounds) -> Sequence[Autoscaler]:
    on_cpu, on_queue = HpaOnCpu(bounds, question.cpu_target), HpaOnQueue(bounds, question.queue_target)
    return SluiceRule(bounds), on_cpu, on_queue, Fixed(bounds)


def _check_sizes(requests: Sequence[TracedRequest], shape: WorkerShape) -> None:
    most = max(request.prompt_tokens + request.output_tokens for request in requests)
    if most > shape.cache_tokens:
        raise BadFlag(f"The trace has a request of {most} tokens, and --cache-tokens is {shape.cache_tokens}; raise it")


def _row(name: str, outcome: FleetOutcome, question: Replay) -> ReplayRow:
    flights = outcome.flights
    in_time = sum(
        flight.ttft_s <= question.ttft_s and 1e3 * flight.inter_token_s <= question.inter_token_ms for flight in flights
    )
    return ReplayRow(
        autoscaler=name,
        requests=len(flights),
        worker_hours=outcome.worker_hours,
        within_objective=in_time / len(flights),
        ttft_s=_percentiles([flight.ttft_s for flight in flights]),
        inter_token_ms=_percentiles([1e3 * flight.inter_token_s for flight in flights]),
        most_workers=max((workers for _, workers, _ in outcome.curve), default=question.min_workers),
        started=outcome.started,
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{rank}": ordered[min(len(ordered) * rank // 100, len(ordered) - 1)] for rank in (50, 95, 99)}


def drawn(outcomes: Mapping[str, FleetOutcome]) -> str:
    """Returns an SVG document: workers and waiting requests over the minutes, for each autoscaler."""
    return plot([Panel(*panel, "linear", "linear") for panel in _panels(outcomes)], 2, COLOURS)


def _panels(outcomes: Mapping[str, FleetOutcome]) -> Iterator[tuple[str, str, dict[str, list[tuple[float, float]]]]]:
    start = (0.0, 0.0)
    for number, title in ((1, "workers, starting ones included"), (2, "requests that wait")):
        lines = {
            name: [(point[0] / MINUTE_S, float(point[number])) for point in outcome.curve] or [start]
            for name, outcome in outcomes.items()
        }
        yield title, "minutes", lines


def run(question: Replay, svg: Path | None, as_json: bool, console: Console) -> int:
    """Replays and prints a table or JSON, and draws the plot; returns exit code 0.

    Raises:
        BadFlag: as `replay`, or the plot cannot be written.
    """
    rows, outcomes = replay(question)
    if svg is not None:
        try:
            svg.write_text(drawn(outcomes), "utf-8")
        except OSError as error:
            raise BadFlag(f"--svg {svg} cannot be written: {error.strerror}") from error
    if as_json:
        document: dict[str, Any] = {**asdict(question), "trace": str(question.trace)}
        print(json.dumps({"replay": document, "rows": [asdict(row) for row in rows]}))
        return 0
    console.print(
        f"{rows[0].requests:,} requests in virtual time; a worker takes {question.startup_s:g} s to start; in time is "
        f"a TTFT of {question.ttft_s:g} s and {question.inter_token_ms:g} ms a token"
    )
    console.print(_table(rows))
    return 0


def _table(rows: Sequence[ReplayRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("autoscaler", no_wrap=True)
    titles = ("worker hours", "in time", "TTFT p50 / p95 / p99 s", "inter-token p50 / p95 / p99 ms", "most", "started")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.autoscaler,
            f"{row.worker_hours:.2f}",
            f"{row.within_objective:.1%}",
            " / ".join(f"{value:.2f}" for value in row.ttft_s.values()),
            " / ".join(f"{value:.1f}" for value in row.inter_token_ms.values()),
            str(row.most_workers),
            str(row.started),
        )
    return table
