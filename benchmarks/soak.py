"""Hours of churn, rude clients, batches, images and renewed certificates, and what lives through it holds more of.

    python benchmarks/soak.py --hours 2 --svg soak.svg

The suite and the churn of `churn.py`, with mutual TLS between its services, whose certificates last for minutes and are
renewed. The gateway, the first replica of each tier and Redis live throughout. Of each process, memory, open files,
threads and tasks are sampled, of Redis memory, keys and reservations, and after a warm-up a line is fitted: growth
beyond its standard error fails, as does any request with another answer than before the churn, and anything left of
requests at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Annotated

import httpx
import psutil
import typer
import uvloop
from churn import TIERS, Churn, ChurnedSuite, churned_suite, nothing_left, report
from churn_load import GUEST, ChurnLoad
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table
from slopes import HOUR_S, Slope, slope_of
from soak_load import run_batches, run_images, run_rude

from sluice.cli.sizing.line_plot import Panel, plot

KEPT = ("gateway", "preprocess", "router", "postprocess-0", "worker-0")
"""The processes of the suite that live throughout, which are measured."""
REDIS = "redis"
CHURNED = {tier: [name for name in names if name not in KEPT] for tier, names in TIERS.items()}
LEAST = {"memory MiB": 8.0, "files": 3.0, "threads": 1.0, "tasks": 3.0, "keys": 10.0, "reservations": 5.0}
"""The least growth in all that is growth, by quantity."""
SAMPLE_EVERY_S = 5.0
CALM_S = 10.0
CERTIFICATE_LASTS = timedelta(minutes=5)
RENEWED_EVERY_S = 120.0
_KEPT_FILES_S = "120"
_TASKS = re.compile(r"^sluice_process_tasks(?:\{[^}]*\})? (\S+)$", re.MULTILINE)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
Key = tuple[str, str]


@dataclass
class Samples:
    """What lived throughout held, by process and quantity."""

    churned: ChurnedSuite
    points: dict[Key, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    async def take(self, until_s: float) -> None:
        """Samples until a time."""
        suite = self.churned.suite
        urls = {"gateway": suite.url, **{name: f"http://{at}" for name, at in self.churned.metrics.items()}}
        processes = {name: psutil.Process(suite.pid(name)) for name in KEPT}
        started = time.monotonic()
        async with httpx.AsyncClient(timeout=30) as client, Redis(port=self.churned.redis.port) as redis:
            while time.monotonic() < until_s:
                held = {name: await self._held(client, urls[name], processes[name]) for name in KEPT}
                held[REDIS] = await self._stored(redis)
                for name, quantities in held.items():
                    for quantity, value in quantities.items():
                        self.points[name, quantity].append((time.monotonic() - started, value))
                await asyncio.sleep(SAMPLE_EVERY_S)

    async def _held(self, client: httpx.AsyncClient, url: str, process: psutil.Process) -> dict[str, float]:
        text = (await client.get(f"{url}/metrics")).text
        return {
            "memory MiB": process.memory_info().rss / 2**20,
            "files": float(process.num_fds()),
            "threads": float(process.num_threads()),
            "tasks": sum(map(float, _TASKS.findall(text))),
        }

    async def _stored(self, redis: Redis) -> dict[str, float]:
        keys = [key async for key in redis.scan_iter("*:reservations", count=1000)]
        return {
            "memory MiB": psutil.Process(self.churned.redis.pid).memory_info().rss / 2**20,
            "keys": float(await redis.dbsize()),
            "reservations": float(sum([await redis.hlen(key) for key in keys])),
        }


async def renew(churned: ChurnedSuite, stop: asyncio.Event) -> None:
    """Renews the certificates of all processes, long before they expire."""
    assert churned.credentials is not None
    while not stop.is_set():
        for name in churned.suite.names:
            await asyncio.to_thread(churned.credentials.issue, name, CERTIFICATE_LASTS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RENEWED_EVERY_S):
                await stop.wait()


async def run_soak(churned: ChurnedSuite, seed: int, hours: float, streams: int, rate: float) -> tuple[bool, Samples]:
    """Runs all loads beside the churn and the sampling, and prints what became of the requests."""
    suite = churned.suite
    churn = Churn(churned, random.Random(seed), {**CHURNED, GUEST: TIERS[GUEST]}, guest_since=time.monotonic())
    load = ChurnLoad(suite.url, streams, rate, churn.guest_serves)
    await load.learn()
    samples = Samples(churned)
    stop, until_s = asyncio.Event(), time.monotonic() + HOUR_S * hours
    others = (
        run_rude(suite.url, stop),
        run_batches(suite.url, load.seen, stop),
        run_images(suite.url, load.seen, stop),
        renew(churned, stop),
    )
    loading = asyncio.gather(load.run(stop), *others)
    try:
        await asyncio.gather(churn.run(until_s), samples.take(until_s))
        await asyncio.sleep(CALM_S)
    finally:
        stop.set()
        await loading
    remaining = await nothing_left(churned)
    print(f"events: {churn.events}, longest pause in a stream {load.seen.longest_pause_s:.1f} s")
    report(load.seen, remaining)
    return not load.seen.problems and not any(remaining.values()), samples


def shown(slopes: Mapping[Key, Slope], points: Mapping[Key, Sequence[tuple[float, float]]]) -> Table:
    """Returns a table of the slopes."""
    table = Table(title="per hour, after the warm-up")
    for column in ("process", "quantity", "at first", "at last", "slope", "error", ""):
        table.add_column(column, justify="left" if column in ("process", "quantity", "") else "right")
    for (name, quantity), slope in slopes.items():
        first, last = points[name, quantity][0][1], points[name, quantity][-1][1]
        figures = f"{first:,.1f}", f"{last:,.1f}", f"{slope.per_hour:+,.2f}", f"{slope.error:,.2f}"
        table.add_row(name, quantity, *figures, "grows" if slope.grows(LEAST[quantity]) else "")
    return table


def drawn(points: Mapping[Key, Sequence[tuple[float, float]]]) -> str:
    """Returns an SVG with a diagram for each quantity: the mean of every minute."""
    panels = [
        Panel(
            quantity,
            "minutes",
            {name: minutely(points[name, quantity]) for name in (*KEPT, REDIS) if (name, quantity) in points},
            "linear",
            "linear",
        )
        for quantity in LEAST
    ]
    return plot(panels, 2)


def minutely(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns (minutes, mean value) of every minute with samples of (seconds, value)."""
    minutes = groupby(points, key=lambda point: point[0] // 60)
    return [(minute + 0.5, fmean(value for _, value in samples)) for minute, samples in minutes]


@app.command()
def main(
    hours: Annotated[float, typer.Option(min=0.02, help="time of the churn")] = 2.0,
    seed: Annotated[int, typer.Option(help="decides which process ends when")] = 1,
    streams: Annotated[int, typer.Option(min=1, help="streams at a time, without a pause")] = 32,
    rate: Annotated[float, typer.Option(min=0.1, help="short requests a second")] = 10.0,
    svg: Annotated[Path | None, typer.Option(help="draw the samples into this file")] = None,
) -> None:
    """Soak a suite for hours, and fit a line to what each process holds."""
    others = [name for name in KEPT if name != "gateway"]
    with churned_suite(("--files-kept-s", _KEPT_FILES_S), others, secured=True) as churned:
        good, samples = uvloop.run(run_soak(churned, seed, hours, streams, rate))
    slopes = {key: slope_of(points) for key, points in samples.points.items()}
    Console(width=120).print(shown(slopes, samples.points))
    if svg is not None:
        svg.write_text(drawn(samples.points))
    grown = [key for key, slope in slopes.items() if slope.grows(LEAST[key[1]])]
    print(f"{hours:g} hours: {'all as it has to be' if good and not grown else 'FAILED'}")
    raise typer.Exit(0 if good and not grown else 1)


if __name__ == "__main__":
    app()
