"""Two gateways on one port against one: how much more do they serve when there are cores for both?

Two gateways, the services behind them and the clients want more than two cores. So every gateway is held to a small
share of a core, which makes the gateway what limits the whole, and leaves the others room. Every gateway gets as many
streams, so that none is pressed harder than the other: what a token costs depends on that, because under pressure
tokens share their writes. What the services and the clients used is printed: where they come near what the machine has,
the ratio says less than the gateways could.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from statistics import median
from typing import Annotated, Any
from urllib.parse import urlsplit

import psutil
import typer
from drive import run_load
from hold import held
from load import Load
from processes import cpu_seconds, own_suite, suite_of

MAX_USED = 0.9

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def measure(gateways: int, load: Load, share: float) -> dict[str, Any]:
    """One suite under load."""
    with own_suite(2, 1000.0, ["--gateways", str(gateways)]) as url:
        where = urlsplit(url)
        services = suite_of(where.port or 80)
        ours = {name: process for name, process in services.items() if name.startswith("gateway")}
        load = replace(
            load,
            host=where.hostname or "127.0.0.1",
            port=where.port or 80,
            streams=load.streams * gateways,
            requests=load.requests * gateways,
            warmup=load.warmup * gateways,
        )
        marks: list[tuple[float, float, dict[str, float]]] = []

        def mark() -> None:
            marks.append((time.perf_counter(), sum(psutil.cpu_times()[:3]), cpu_seconds(services)))

        with held(list(ours.values()), share) if share < 1 else nullcontext():
            outcome = run_load(load, 1, mark, mark)
    (began, busy_before, before), (ended, busy_after, after) = marks
    seconds = ended - began
    used = {name: after[name] - before[name] for name in services}
    of_gateways = [round(used[name] / seconds, 3) for name in ours]
    return {
        "gateways": gateways,
        "tokens_per_s": round(outcome.tokens / seconds),
        "errors": outcome.errors.total(),
        "events_per_token": round(outcome.events / max(outcome.tokens, 1), 2),
        "gateway_cores": of_gateways,
        "gateway_us_per_token": round(1e6 * sum(used[name] for name in ours) / max(outcome.tokens, 1), 1),
        "other_services_cores": round(sum(used[name] for name in services if name not in ours) / seconds, 2),
        "client_cores": round(outcome.client_cpu / seconds, 2),
        "machine_busy": round((busy_after - busy_before) / seconds / (os.cpu_count() or 1), 2),
    }


@app.command()
def gateways(
    share: Annotated[float, typer.Option(min=0.02, max=1, help="of a core for each gateway; 1: not held")] = 0.12,
    streams: Annotated[int, typer.Option(min=1, help="at once, for each gateway")] = 128,
    requests: Annotated[int, typer.Option(min=1, help="in all, for each gateway")] = 768,
    tokens: Annotated[int, typer.Option(min=2, help="of every answer")] = 128,
    words: Annotated[int, typer.Option(min=1, help="of every prompt")] = 50,
    rounds: Annotated[int, typer.Option(min=1, help="in turns")] = 2,
) -> None:
    """Measure one and two gateways in turns."""
    load = Load("", 0, "tekken", streams, requests, tokens, words, warmup=streams, timeout_s=300)
    ratios = []
    for _ in range(rounds):
        rows = []
        for number in (1, 2):
            rows.append(measure(number, load, share))
            print(json.dumps(rows[-1]), flush=True)
            if rows[-1]["machine_busy"] > MAX_USED:
                print("the machine was busy: this round says less than the gateways could", file=sys.stderr)
        ratios.append(rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"])
    print(json.dumps({"ratios": [round(ratio, 2) for ratio in ratios], "median": round(median(ratios), 2)}))


if __name__ == "__main__":
    try:
        app()
    except (OSError, RuntimeError) as error:
        sys.exit(f"gateways.py: {error}")
