"""What workers of other models cost a gateway process: it keeps a session to each of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
from drive import run_load
from growth_place import WITHIN_S, Scale, fleet
from leftovers import address
from load import Load
from processes import cpu_seconds, own_suite, resident_bytes, suite_of

from services.common.net.ports import free_port

OWN_WORKERS = 2
REQUESTS, STREAMS, TOKENS, WORDS = 400, 16, 8, 50
SETTLE_S = 5.0


async def measured_gateway(workers: int, seconds: float) -> dict[str, Any]:
    """Returns what a gateway uses that knows so many workers besides the two that answer its requests."""
    async with AsyncExitStack() as stack:
        url = stack.enter_context(own_suite(OWN_WORKERS, 1000.0))
        port = urlsplit(url).port or 80
        suite = suite_of(port)
        if workers:
            scale = Scale(workers=workers, blocks=100 * workers)
            await stack.enter_async_context(fleet(scale, [address(suite["router"])], free_port()))
            await _connected(url, workers + OWN_WORKERS)
        await asyncio.sleep(SETTLE_S)
        gateway = {"gateway": suite["gateway"]}
        before = cpu_seconds(gateway)["gateway"]
        await asyncio.sleep(seconds)
        idle = (cpu_seconds(gateway)["gateway"] - before) / seconds
        marks: list[float] = []

        def mark() -> None:
            marks.append(cpu_seconds(gateway)["gateway"])

        load = Load("127.0.0.1", port, "tekken", STREAMS, REQUESTS, TOKENS, WORDS, warmup=STREAMS)
        outcome = await asyncio.to_thread(run_load, load, 1, mark, mark)
        if outcome.errors:
            raise RuntimeError(f"requests failed: {outcome.errors.most_common(1)}")
        used = marks[1] - marks[0] - idle * (outcome.ended - outcome.started)
        return {
            "workers": workers,
            "idle_cores": idle,
            "request_us": 1e6 * used / REQUESTS,
            "mib": resident_bytes(gateway)["gateway"] / 2**20,
        }


async def _connected(url: str, workers: int) -> None:
    """Waits until the gateway is connected to so many workers."""
    async with asyncio.timeout(WITHIN_S), httpx.AsyncClient(timeout=30) as client:
        while True:
            state = (await client.get(f"{url}/ready?workers=0")).json()
            if state.get("workers", 0) >= workers:
                return
            await asyncio.sleep(0.5)


def gateway_table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    lines = ["| workers of other models | without requests | a request | MiB |", "| ---: | ---: | ---: | ---: |"]
    for row in rows:
        idle = f"{row['idle_cores']:.1%} of a core"
        lines.append(f"| {row['workers']:,} | {idle} | {row['request_us']:,.0f} µs | {row['mib']:,.0f} |")
    return lines
