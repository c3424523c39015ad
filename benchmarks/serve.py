"""Measures a serving endpoint in a closed loop: speed, latency, and the CPU each service spends on a token."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import psutil
import typer
from drive import run_load
from load import Load
from processes import cpu_seconds, own_suite, parse_pids, suite_of
from report import figures, machine, show
from rich.console import Console

# (streams, requests, tokens, words)
PRESETS = {
    "stream1": (1, 100, 128, 150),
    "streams32": (32, 640, 128, 150),
    "streams256": (256, 2560, 128, 150),
    "long": (256, 1024, 512, 150),
    "prompts": (64, 512, 128, 2500),
}
MAX_WARMUP = 256

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def measure(name: str, load: Load, processes: int, services: dict[str, psutil.Process]) -> dict[str, Any]:
    """Runs one load and returns its figures."""
    spent: list[dict[str, float]] = []

    def look() -> None:
        spent.append(cpu_seconds(services))

    outcome = run_load(load, processes, look, look)
    before, after = spent
    return figures(name, load, outcome, {service: after[service] - before[service] for service in services})


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="endpoint to measure")] = "http://127.0.0.1:8000",
    up: Annotated[bool, typer.Option("--up", help="start a suite of its own and measure that")] = False,
    workers: Annotated[int, typer.Option(help="with --up: number of mock workers")] = 2,
    speedup: Annotated[float, typer.Option(help="with --up: how much faster the mock engine's clock runs")] = 1000.0,
    model: Annotated[str, typer.Option(help="served model name")] = "tekken",
    preset: Annotated[
        Literal["", "stream1", "streams32", "streams256", "long", "prompts", "all"],
        typer.Option(help="a known load instead of the next four flags"),
    ] = "",
    streams: Annotated[int, typer.Option(min=1, help="requests under way at once")] = 256,
    requests: Annotated[int, typer.Option(min=0, help="requests in all; 0: ten a stream")] = 0,
    tokens: Annotated[int, typer.Option(min=2, help="tokens of every answer")] = 128,
    words: Annotated[int, typer.Option(min=1, help="words of every prompt")] = 150,
    pid: Annotated[list[str] | None, typer.Option(help="NAME=PID of a service to watch, repeated")] = None,
    pids: Annotated[
        Literal["auto", "none"], typer.Option(help="auto: watch the services of the `sluice up` behind the url")
    ] = "auto",
    processes: Annotated[int, typer.Option(min=1, help="client processes")] = 1,
    fresh: Annotated[bool, typer.Option("--fresh", help="open a connection for each request")] = False,
    seed: Annotated[int, typer.Option(help="of the prompts; 0: new ones, which are in no prefix cache")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Measure speed, latency and CPU per token of an OpenAI-compatible endpoint."""
    names = list(PRESETS) if preset == "all" else [preset] if preset else []
    loads = {name: PRESETS[name] for name in names} or {"custom": (streams, requests or 10 * streams, tokens, words)}
    with own_suite(workers, speedup) if up else nullcontext(url) as target:
        where = urlsplit(target)
        port = where.port or 80
        services = parse_pids(pid) if pid else suite_of(port) if pids == "auto" else {}
        rows = []
        for name, (at_once, count, length, prompt) in loads.items():
            load = Load(
                host=where.hostname or "127.0.0.1",
                port=port,
                model=model,
                streams=at_once,
                requests=count,
                tokens=length,
                words=prompt,
                warmup=min(max(at_once, 10), MAX_WARMUP),
                seed=seed or time.time_ns(),
                fresh=fresh,
            )
            rows.append(measure(name, load, processes, services))
    if as_json:
        print(json.dumps({"machine": machine(), "loads": rows}, indent=2))
    else:
        show(rows, Console(width=160))
    raise typer.Exit(1 if any(row["errors"] for row in rows) else 0)


if __name__ == "__main__":
    try:
        app()
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"serve.py: {error}")
