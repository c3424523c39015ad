"""`sluice workers`: lists the workers with their health and load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.gateway.backends.workers.overview import WorkerState
from sluice.cli.live.client import reached
from sluice.cli.live.endpoint import Endpoint

HEALTHY, UNHEALTHY = 0, 1
NARROW = 110
STYLES = {"serving": "green", "draining": "yellow"}


def run(endpoint: Endpoint, as_json: bool, console: Console) -> int:
    """Queries and prints; returns exit code 0 if there are workers and all serve, else 1."""
    found = asyncio.run(_query(endpoint))
    if as_json:
        print(json.dumps([{**asdict(worker), "health": health} for worker, health in found]))
    elif not found:
        console.print("No worker has registered with the router; start one with `sluice worker`.")
    else:
        console.print(_table(found, console.width))
    return HEALTHY if found and all(health in STYLES for _, health in found) else UNHEALTHY


async def _query(endpoint: Endpoint) -> Sequence[tuple[WorkerState, str]]:
    async with reached(endpoint) as running:
        workers = await running.workers()
        statuses = await asyncio.gather(*(running.status_of(worker.address) for worker in workers))
    pairs = zip(workers, statuses, strict=True)
    return [(worker, _health(worker, status.health)) for worker, status in pairs]


def _health(worker: WorkerState, reported: str) -> str:
    """Returns what the router makes of a worker or, if it serves, what the worker itself reports."""
    if worker.set_aside:
        return f"set aside: {worker.set_aside}"
    return "draining" if worker.draining else reported.lower()


def _table(found: Sequence[tuple[WorkerState, str]], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    about = ("model", "role", "engine", "address") if width >= NARROW else ()
    for title in ("worker", "health", *about):
        table.add_column(title, no_wrap=True)
    for title in ("running", "waiting", "reserved", "in use", "cached"):
        table.add_column(title, justify="right")
    for worker, health in found:
        total = worker.total_blocks or 1
        table.add_row(
            escape(worker.id),
            f"[{STYLES.get(health, 'bold red')}]{health}[/]",
            *([escape(text) for text in _about(worker)] if about else ()),
            str(worker.running),
            str(worker.waiting),
            str(worker.booked),
            f"{worker.used_blocks / total:.0%}",
            f"{min(worker.cached_blocks / total, 1):.0%}",
        )
    return table


def _about(worker: WorkerState) -> tuple[str, ...]:
    return worker.model, worker.role, f"{worker.engine} {worker.version}".strip(), worker.address
