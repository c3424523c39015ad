"""What a batch costs interactive requests: their time to the first token without a batch and beside one.

    python benchmarks/batches.py [--lines 10000] [--streams 64] [--seconds 30]

A suite of its own with a real Redis, two gateways and the mock engine at an engine's pace. Interactive clients stream
chats in a closed loop; their first tokens are measured before the batch, and while it runs. The batch then goes on to
its end; with --kill, a gateway is killed on the way. The exit code is 1 unless every line has exactly one result.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.servers.redis_server import RedisServer
from tests.support.servers.suite import Suite

PAUSE_S = 0.5
TIMEOUT_S = 120.0


class Clients:
    """Interactive clients that stream chats in a closed loop.

    Attributes:
        first_s: seconds to the first token of each answer since the last `clear`.
    """

    def __init__(self, url: str, number: int) -> None:
        self._url = url
        self._number = number
        self.first_s: list[float] = []

    async def run(self) -> None:
        """Runs until cancelled."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._number):
                group.create_task(self._loop(client, random.Random(number)))

    async def _loop(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        while True:
            words = " ".join(str(draw.random()) for _ in range(30))
            body = {"model": "tekken", "messages": [{"role": "user", "content": words}], "max_tokens": 64}
            began = time.perf_counter()
            first = 0.0
            request: dict[str, Any] = {**body, "stream": True, "ignore_eos": True}
            async with client.stream("POST", "/v1/chat/completions", json=request) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if not first and '"content":"' in line and '"content":""' not in line:
                        first = time.perf_counter() - began
            self.first_s.append(first)
            await asyncio.sleep(draw.random() * PAUSE_S)


def start_batch(url: str, lines: int) -> str:
    """Uploads a file and starts its batch; returns its id."""
    text = "\n".join(
        json.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": "tekken",
                    "messages": [{"role": "user", "content": f"Line {number}"}],
                    "max_tokens": 8,
                },
            }
        )
        for number in range(lines)
    )
    files = {"file": ("lines.jsonl", text.encode())}
    file = httpx.post(f"{url}/v1/files", data={"purpose": "batch"}, files=files, timeout=TIMEOUT_S).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch_id: str = httpx.post(f"{url}/v1/batches", json=body, timeout=TIMEOUT_S).json()["id"]
    return batch_id


async def ended(url: str, batch_id: str, console: Console) -> dict[str, Any]:
    """Waits for the end of a batch, and shows its progress."""
    shown = 0.0
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        while True:
            try:
                batch: dict[str, Any] = (await client.get(f"/v1/batches/{batch_id}")).json()
            except httpx.TransportError:  # its gateway was killed
                batch = {}
            if batch.get("status") in ("completed", "failed", "expired", "cancelled"):
                return batch
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                console.print(f"{batch.get('request_counts')}", style="dim")
            await asyncio.sleep(1)


def results(url: str, file_id: str) -> list[str]:
    """Returns the `custom_id` of each line of an output file."""
    text = httpx.get(f"{url}/v1/files/{file_id}/content", timeout=TIMEOUT_S).text
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


def percentile(values: list[float], part: float) -> float:
    """Returns a percentile in milliseconds."""
    ordered = sorted(values)
    return 1e3 * ordered[min(int(part * len(ordered)), len(ordered) - 1)]


async def measure(suite: Suite, lines: int, streams: int, seconds: float, kill: bool, console: Console) -> bool:
    """Runs the loads and prints the table; returns whether every line has exactly one result."""
    clients = Clients(suite.url, streams)
    running = asyncio.create_task(clients.run())
    await asyncio.sleep(5)  # connections, caches
    table = Table(title=f"first token of {streams} interactive streams")
    for title in ("", "answers", "p50 ms", "p99 ms"):
        table.add_column(title, justify="right" if title else "left")
    found = []
    batch_id = ""
    for name in ("without a batch", "beside a batch"):
        if name == "beside a batch":
            batch_id = await asyncio.to_thread(start_batch, suite.url, lines)
            await asyncio.sleep(3)
        clients.first_s.clear()
        await asyncio.sleep(seconds)
        values = list(clients.first_s)
        found.append(percentile(values, 0.99))
        table.add_row(name, f"{len(values)}", f"{percentile(values, 0.5):.1f}", f"{found[-1]:.1f}")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    if kill:
        suite.processes("gateway")[0].kill()
    batch = await ended(suite.url, batch_id, console)
    names = await asyncio.to_thread(results, suite.url, batch["output_file_id"])
    console.print(table)
    console.print(f"p99 ratio {found[1] / found[0]:.2f}; {len(names):,} results of {lines:,} lines, {batch['status']}")
    return sorted(names) == sorted(f"line-{number}" for number in range(lines))


def main(
    lines: Annotated[int, typer.Option(min=1, help="requests of the batch")] = 10_000,
    streams: Annotated[int, typer.Option(min=1, help="interactive clients")] = 64,
    seconds: Annotated[float, typer.Option(min=1, help="length of each measurement")] = 30,
    kill: Annotated[bool, typer.Option("--kill", help="kill a gateway after the measurements")] = False,
) -> None:
    """Measures the first tokens of interactive streams without and beside a batch."""
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder), durable=True)
        redis.start()
        try:
            with Suite("--gateways", "2", "--redis", redis.url, "--restart", "--speedup", "1") as suite:
                exactly_once = asyncio.run(measure(suite, lines, streams, seconds, kill, Console()))
        finally:
            redis.stop()
    if not exactly_once:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
