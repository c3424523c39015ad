"""Replays a request trace against mock workers in virtual time, with the router's own code choosing among them."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Annotated, Any, NamedTuple

import typer
from report import machine
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from trace_agents import agent_arrivals
from trace_fleet import Affinity, Arrival, Outcome, Shape, Simulation, read_trace, without_reuse
from trace_plot import plot

from services.router.state.reservations.cost import PREFILL_LOAD_SCALE

POLICIES = ["kv", "round_robin", "random", "least_loaded", "power_of_two"]
SPEEDUPS = [4.0, 5.0, 6.0, 7.0, 8.0]
SCALES = [PREFILL_LOAD_SCALE]
AGENT_REQUESTS = 12_000
TELLS_EVERY = 100

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Run(NamedTuple):
    """One simulation; `trace` None: of generated agents."""

    trace: Path | None
    requests: int
    distinct: bool
    policy: str
    speedup: float
    shape: Shape
    rewritten: bool = False


_news: Queue[int] | None = None  # of a process: arrivals simulated


def _listen_to(news: Queue[int]) -> None:
    global _news
    _news = news


def simulate(run: Run) -> dict[str, Any]:
    """Runs one simulation; in a process of its own."""
    arrivals = arrivals_of(run)
    if run.distinct:
        arrivals = without_reuse(arrivals)

    def progress(arrived: int) -> None:
        if arrived % TELLS_EVERY == 0 and _news is not None:
            _news.put(TELLS_EVERY)

    outcome = asyncio.run(Simulation(arrivals, run.policy, run.speedup, run.shape).run(progress))
    return figures(run, outcome)


def arrivals_of(run: Run) -> list[Arrival]:
    """Returns the requests of a trace, the same for all seeds, or generates those of the run's seed."""
    if run.trace is None:
        return agent_arrivals(run.requests or AGENT_REQUESTS, run.shape.seed, run.rewritten)
    return read_trace(run.trace, run.requests)


def figures(run: Run, outcome: Outcome) -> dict[str, Any]:
    """What came of it; times in seconds."""
    return {
        "speedup": run.speedup,
        "policy": run.policy,
        "prefill_load_scale": run.shape.prefill_load_scale,
        "seed": run.shape.seed,
        "requests": outcome.offered,
        "per_s": outcome.offered / outcome.ended_s,
        "cached_per_turn": outcome.cached_tokens / max(len(outcome.ttft_s), 1),
        "stayed": outcome.stayed / max(outcome.followed, 1),
        "hit": outcome.cached_tokens / max(outcome.prompt_tokens, 1),
        "ttft": _spread(outcome.ttft_s),
        "inter_token": _spread(outcome.inter_token_s),
        "shed": outcome.shed / max(outcome.offered, 1),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    return {
        "mean": sum(ordered) / len(ordered),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)],
    }


def mean_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row out of those of several seeds."""
    first = dict(rows[0])
    for key in ("hit", "shed", "per_s", "cached_per_turn", "stayed"):
        first[key] = sum(row[key] for row in rows) / len(rows)
    for key in ("ttft", "inter_token"):
        first[key] = {part: sum(row[key][part] for row in rows) / len(rows) for part in first[key]}
    first["seeds"] = len(rows)
    first["ttft_mean_of_seeds"] = [row["ttft"]["mean"] for row in rows]
    del first["seed"]
    return first


def run_all(runs: Sequence[Run], processes: int, console: Console) -> list[dict[str, Any]]:
    """Runs simulations side by side; the answers in the order of the runs."""
    context = multiprocessing.get_context("spawn")
    news: Queue[int] = context.Queue()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        ProcessPoolExecutor(processes, context, _listen_to, (news,)) as pool,
        Progress(*columns, console=console) as progress,
    ):
        arrivals = len(arrivals_of(runs[0])) * len(runs)
        bar = progress.add_task("requests", total=arrivals)
        futures = [pool.submit(simulate, run) for run in runs]
        for arrived in _heard(futures, news):
            progress.advance(bar, arrived)
        progress.update(bar, completed=arrivals)
        return [future.result() for future in futures]


def _heard(futures: Sequence[Future[dict[str, Any]]], news: Queue[int]) -> Iterator[int]:
    while not all(future.done() for future in futures):
        try:
            yield news.get(timeout=0.5)
        except Empty:
            continue
    for future in as_completed(futures):
        future.result()


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """For people."""
    table = Table(title="virtual time")
    waits = ("TTFT mean s", "p50 s", "p99 s", "inter-token ms", "p99 ms")
    for title in ("speed-up", "policy", "scale", "cached", "a turn", "stayed", *waits, "shed"):
        table.add_column(title, justify="left" if title == "policy" else "right")
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before["speedup"] != row["speedup"]:
            table.add_section()
        table.add_row(
            f"{row['speedup']:g}×",
            row["policy"],
            f"{row['prefill_load_scale']:g}",
            f"{row['hit']:.1%}",
            f"{row['cached_per_turn']:,.0f}",
            f"{row['stayed']:.1%}",
            *(f"{value:.2f}" for value in row["ttft"].values()),
            f"{1e3 * row['inter_token']['mean']:.1f}",
            f"{1e3 * row['inter_token']['p99']:.1f}",
            f"{row['shed']:.2%}",
        )
    return table


@app.command()
def trace(
    trace: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="JSON lines, see README.md")] = None,
    agents: Annotated[
        bool, typer.Option("--agents", help="generate agents with long shared system prompts instead of --trace")
    ] = False,
    speedup: Annotated[list[float], typer.Option(min=0.1, help="how much faster requests arrive, repeated")] = SPEEDUPS,
    policy: Annotated[list[str], typer.Option(help="policies, repeated")] = POLICIES,
    requests: Annotated[int, typer.Option(min=0, help="first requests of the trace; 0: all, of agents 12,000")] = 0,
    distinct: Annotated[bool, typer.Option("--distinct", help="give every block another id: nothing to reuse")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="runs with other random numbers, averaged")] = 1,
    workers: Annotated[int, typer.Option(min=1)] = 8,
    cache_tokens: Annotated[int, typer.Option(help="tokens of KV cache a worker has")] = 1_048_576,
    block_size: Annotated[int, typer.Option(help="tokens a block; divides 512")] = 512,
    max_sequences: Annotated[int, typer.Option(help="requests a worker runs at once")] = 256,
    max_batched_tokens: Annotated[int, typer.Option(help="tokens of one engine step")] = 8_192,
    max_waiting: Annotated[int, typer.Option(help="requests that may wait at a worker; more are shed")] = 64,
    prefill_load_scale: Annotated[
        list[float], typer.Option(min=0, help="of the router's cost function, repeated; the policy kv uses all of them")
    ] = SCALES,
    affinity: Annotated[
        Affinity, typer.Option(help="of --agents: requests of a conversation, an agent or one user are one session")
    ] = "none",
    rewritten: Annotated[
        bool, typer.Option("--rewritten", help="of --agents: sessions of 30 turns that rewrite their middle every turn")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="simulations at once")] = 2,
    svg: Annotated[Path | None, typer.Option(help="where to draw the plot")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Compares routing policies on a trace."""
    if (trace is None) != agents:
        raise typer.BadParameter("Give either --trace or --agents.")
    if (rewritten or affinity != "none") and not agents:
        raise typer.BadParameter("A trace does not contain its sessions; --affinity and --rewritten need --agents.")
    console = Console(stderr=as_json)
    cells = [
        (speed, name, scale)
        for speed in speedup
        for name in policy
        for scale in (prefill_load_scale if name == "kv" else prefill_load_scale[:1])
    ]
    runs = [
        Run(
            trace,
            requests,
            distinct,
            name,
            speed,
            Shape(
                workers,
                cache_tokens,
                block_size,
                max_sequences,
                max_batched_tokens,
                max_waiting,
                scale,
                seed,
                affinity,
            ),
            rewritten,
        )
        for speed, name, scale in cells
        for seed in range(1, seeds + 1)
    ]
    found = run_all(runs, processes, console)
    rows = [mean_of(found[at : at + seeds]) for at in range(0, len(found), seeds)]
    if svg is not None:
        svg.write_text(plot(rows))
    console.print(table_of(rows))
    if as_json:
        json.dump(
            {"machine": machine(), "distinct": distinct, "agents": agents, "affinity": affinity, "rows": rows},
            sys.stdout,
            indent=2,
        )
        print()


if __name__ == "__main__":
    app()
