"""Measures what each tier costs a request, a token of a prompt and a token of an answer: the data of `sluice size`.

Every load gets a suite of its own with one replica of each tier, one mock worker at an engine's pace, and Redis, so
that memory is that of the load alone. A closed loop keeps its streams busy; no tier is near a whole core, because a
busy tier batches more and costs less. Costs are fitted to the medians of the rounds, and tested on loads that are held
back. CPU time of the worker includes the mock engine's, so it is an upper bound of a worker's own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))  # the support of the tests starts Redis

import psutil
import typer
from cost_fit import Idle, Sample, errors, fit, tier_errors
from drive import run_load
from load import Load
from processes import cpu_seconds, own_suite, resident_bytes, suite_of
from report import machine

from sluice.cli.sizing.costs import FILE, TIERS, WORKER, ModelCosts, Workload
from tests.support.repository import ROOT
from tests.support.servers.redis_server import RedisServer

SPEEDUP = 0.5
"""Of the mock engine: a token takes 12 ms or more, as on an accelerator."""
STEP_S, FIRST_TEXT_S = 0.014, 0.15
SETTLE_S = 3.0
IDLE_S = 15.0
MAX_ERROR = 0.25
"""Share by which held-back loads may differ from what the costs say."""
SERVED = "costs"


@dataclass(frozen=True, slots=True)
class Shape:
    """A load: requests in progress, tokens of an answer, words of a prompt."""

    name: str
    streams: int
    tokens: int
    words: int
    held_back: bool = False


SHAPES = (
    Shape("short", 16, 32, 50),
    Shape("answers", 32, 256, 50),
    Shape("chats", 64, 64, 150),
    Shape("many", 96, 192, 150),
    Shape("documents", 16, 32, 2_000),
    Shape("mixed", 48, 192, 1_000),
    Shape("books", 8, 64, 4_000),
    Shape("held-back chats", 32, 128, 400, held_back=True),
    Shape("held-back answers", 80, 320, 100, held_back=True),
    Shape("held-back documents", 24, 64, 1_500, held_back=True),
)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@contextmanager
def _suite(model: str) -> Iterator[tuple[str, dict[str, psutil.Process]]]:
    """Starts a suite over a Redis; gives its URL and its processes by tier."""
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder))
        redis.start()
        try:
            arguments = ["--redis", redis.url, "--model-name", SERVED, *(["--model", model] if model else [])]
            with own_suite(1, SPEEDUP, arguments) as url:
                named = suite_of(urlsplit(url).port or 80)
                tiers = {WORKER if name.startswith(WORKER) else name: process for name, process in named.items()}
                yield url, {**tiers, "redis": psutil.Process(redis.pid)}
        finally:
            redis.stop()


def measured_idle(model: str) -> Idle:
    """Returns what the tiers use without requests."""
    with _suite(model) as (_, processes):
        time.sleep(SETTLE_S)
        before, started = cpu_seconds(processes), time.perf_counter()
        time.sleep(IDLE_S)
        after, seconds = cpu_seconds(processes), time.perf_counter() - started
        return Idle({name: (after[name] - before[name]) / seconds for name in after}, resident_bytes(processes))


def measured(shape: Shape, model: str, seconds: float) -> Sample:
    """Returns what a load used.

    Raises:
        RuntimeError: a request failed.
    """
    count = shape.streams * max(round(seconds / (FIRST_TEXT_S + STEP_S * shape.tokens)), 2)
    with _suite(model) as (url, processes):
        where = urlsplit(url)
        load = Load(
            host=where.hostname or "127.0.0.1",
            port=where.port or 80,
            model=SERVED,
            streams=shape.streams,
            requests=count,
            tokens=shape.tokens,
            words=shape.words,
            warmup=max(shape.streams, 16),
            seed=time.time_ns(),
        )
        marks: list[dict[str, float]] = []
        outcome = run_load(load, 1, *[lambda: marks.append(cpu_seconds(processes))] * 2)
        memory = resident_bytes(processes)
    if outcome.errors:
        raise RuntimeError(f"{shape.name}: {dict(outcome.errors)}")
    window = outcome.ended - outcome.started
    work = Workload(outcome.answers / window, outcome.prompt_tokens / outcome.answers, shape.tokens, shape.streams)
    cores = {name: (marks[1][name] - marks[0][name]) / window for name in processes}
    return Sample(shape.name, shape.held_back, work, cores, memory)


def merged(samples: Sequence[Sample]) -> Sample:
    """Returns the medians of the rounds of one load: of the CPU time of a request, at the median rate."""
    first, rate = samples[0], median(sample.work.requests_per_s for sample in samples)
    cores = {
        name: rate * median(sample.cores[name] / sample.work.requests_per_s for sample in samples)
        for name in first.cores
    }
    memory = {name: median(sample.memory_bytes[name] for sample in samples) for name in first.memory_bytes}
    prompt = median(sample.work.prompt_tokens for sample in samples)
    work = Workload(rate, prompt, first.work.output_tokens, first.work.streams)
    return Sample(first.name, first.held_back, work, cores, memory)


def merged_idle(rounds: Sequence[Idle]) -> Idle:
    """Returns the medians of the rounds."""
    names = rounds[0].cores
    return Idle(
        {name: median(idle.cores[name] for idle in rounds) for name in names},
        {name: median(idle.memory_bytes[name] for idle in rounds) for name in names},
    )


def document(costs: ModelCosts, idle: Idle, samples: Sequence[Sample], rounds: int) -> dict[str, Any]:
    """Returns what is kept of a model: the costs, where they are from, and the loads."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        **costs.as_json(),
        "machine": machine(),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", "benchmarks/costs.py", *sys.argv[1:]]),
        "rounds": rounds,
        "idle": asdict(idle),
        "loads": [asdict(sample) for sample in samples],
        "held_back_errors": errors(costs.tiers, [sample for sample in samples if sample.held_back]),
    }


def table(costs: ModelCosts, samples: Sequence[Sample]) -> Iterator[str]:
    """Yields the lines of two tables in Markdown: the costs, and the errors."""
    yield "| tier | idle, cores | a request, µs | a prompt token | an output token | idle, MiB | a stream, KiB |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, tier in costs.tiers.items():
        times = [f"{1e6 * value:,.2f}" for value in (tier.request_s, tier.prompt_token_s, tier.output_token_s)]
        memory = f"{tier.idle_bytes / 2**20:,.0f} | {tier.stream_bytes / 2**10:,.0f}"
        yield f"| {name} | {tier.idle_cores:.4f} | {' | '.join(times)} | {memory} |"
    yield ""
    names = list(costs.tiers)
    yield f"| load | requests/s | cores | error | {' | '.join(names)} |"
    yield f"| --- | ---: | ---: | ---: |{' ---: |' * len(names)}"
    together = errors(costs.tiers, samples)
    for sample in samples:
        of_tiers = [f"{tier_errors(costs.tiers[name], name, [sample])[sample.name]:+.0%}" for name in names]
        cores = sum(sample.cores[name] for name in TIERS)
        yield (
            f"| {sample.name} | {sample.work.requests_per_s:.1f} | {cores:.3f} | {together[sample.name]:+.0%} "
            f"| {' | '.join(of_tiers)} |"
        )


def keep(name: str, kept: Mapping[str, Any], path: Path) -> None:
    """Writes the costs of one model; those of others stay."""
    models = json.loads(path.read_text("utf-8"))["models"] if path.exists() else {}
    path.write_text(json.dumps({"models": {**models, name: kept}}, indent=1) + "\n", "utf-8")


@app.command()
def main(
    model: Annotated[str, typer.Option(help="as of `sluice up`; empty: its default")] = "",
    name: Annotated[str, typer.Option(help="under which `sluice size` knows the model")] = "tekken",
    rounds: Annotated[int, typer.Option(min=1, help="of every load, in turns")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="of every load, about")] = 20.0,
    write: Annotated[bool, typer.Option("--write", help="keep the costs where `sluice size` finds them")] = False,
    file: Annotated[Path, typer.Option(help="where --write keeps them")] = FILE,
) -> None:
    """Measure what each tier costs; exit code 1 if a held-back load differs by more than a quarter."""
    idles: list[Idle] = []
    rows: dict[str, list[Sample]] = {shape.name: [] for shape in SHAPES}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        idles.append(measured_idle(model))
        for shape in SHAPES:
            rows[shape.name].append(measured(shape, model, seconds))
            print(rows[shape.name][-1], file=sys.stderr, flush=True)
    idle, samples = merged_idle(idles), [merged(row) for row in rows.values()]
    costs = fit(idle, samples)
    if write:
        keep(name, document(costs, idle, samples, rounds), file)
    print("\n".join(table(costs, samples)))
    raise typer.Exit(1 if costs.error > MAX_ERROR else 0)


if __name__ == "__main__":
    try:
        app()
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"costs.py: {error}")
