"""Measures what the services add between tokens at an engine's pace: HTTP streams and Generate RPCs, in turns.

The RPCs go to the same mock workers without any service between. Each round runs all streams at once; what is shown are
medians over the rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any
from urllib.parse import urlsplit

import grpc
import typer
import uvloop
from drive import run_load
from load import Load
from processes import own_suite, suite_of
from report import medians, percentiles_ms
from rich.console import Console
from rich.table import Table

from services.common.base.packing import pack_u32
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc

MODEL = "tekken"
WORDS = 150
HIGHEST_ID = 100_000

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def inter_token(
    streams: Annotated[int, typer.Option(min=1, help="at once, divided among the workers")] = 256,
    tokens: Annotated[int, typer.Option(min=2, help="of every stream")] = 128,
    workers: Annotated[int, typer.Option(min=1, help="mock workers")] = 2,
    step_ms: Annotated[float, typer.Option(min=1, help="of the mock engine: every stream gets a token")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="of each")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Compare the time between tokens at the client with that of the worker's own Generate RPC."""
    os.environ |= {
        "SLUICE_WORKER_ENGINE_ARGS": f"timing=fixed,fixed_step_ms={step_ms}",
        "SLUICE_WORKER_MAX_SEQUENCES": str(streams),
    }
    seen: dict[str, list[dict[str, Any]]] = {"Generate RPC": [], "HTTP": []}
    with own_suite(workers, 1.0) as url:
        port = urlsplit(url).port or 80
        addresses = [
            line[line.index("--listen") + 1]
            for name, process in suite_of(port).items()
            if name.startswith("worker") and "--listen" in (line := process.cmdline())
        ]
        for turn in range(rounds + 1):
            direct = uvloop.run(_generate(addresses, streams, tokens))
            http = _http(port, streams, tokens)
            if turn:  # the first round warms up
                seen["Generate RPC"].append(direct)
                seen["HTTP"].append(http)
    rows = {name: medians(found) for name, found in seen.items()}
    if as_json:
        print(json.dumps({"step_ms": step_ms, "streams": streams, "rows": rows}, indent=2))
    else:
        Console(width=120).print(_table(rows))


def _http(port: int, streams: int, tokens: int) -> dict[str, Any]:
    load = Load("127.0.0.1", port, MODEL, streams, streams, tokens, WORDS, 0, seed=time.time_ns())
    outcome = run_load(load, 1, lambda: None, lambda: None)
    if outcome.errors:
        raise RuntimeError(f"requests failed: {dict(outcome.errors)}")
    return {"mean": percentiles_ms(outcome.per_token), "pause": percentiles_ms(outcome.pauses)}


async def _generate(addresses: Sequence[str], streams: int, tokens: int) -> dict[str, Any]:
    means, pauses = array("d"), array("d")

    async def one(stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
        prompt = pack_u32([random.randrange(1_000, HIGHEST_ID) for _ in range(WORDS)])
        request = worker_pb2.GenerateRequest(
            request_id=f"pace-{random.getrandbits(64):x}",
            model=MODEL,
            tokens=worker_pb2.TokenPrompt(token_ids=prompt),
            stop=common_pb2.StopOptions(max_tokens=tokens, ignore_eos=True),
        )
        arrivals = [time.perf_counter() async for delta in stub.Generate(request) if delta.token_ids]
        means.append((arrivals[-1] - arrivals[0]) / max(tokens - 1, 1))
        pauses.extend(later - earlier for earlier, later in pairwise(arrivals))

    channels = [grpc.aio.insecure_channel(address) for address in addresses]
    try:
        stubs = [worker_pb2_grpc.WorkerStub(channel) for channel in channels]
        await asyncio.gather(*(one(stubs[number % len(stubs)]) for number in range(streams)))
    finally:
        for channel in channels:
            await channel.close()
    return {"mean": percentiles_ms(means), "pause": percentiles_ms(pauses)}


def _table(rows: dict[str, dict[str, dict[str, float]]]) -> Table:
    table = Table(title="between tokens, ms (p50 / p90 / p99)")
    for title in ("", "inter-token, mean of a request", "pause between two reads"):
        table.add_column(title)
    for name, row in rows.items():
        table.add_row(name, *(" / ".join(f"{value:.2f}" for value in row[kind].values()) for kind in ("mean", "pause")))
    return table


if __name__ == "__main__":
    try:
        app()
    except (OSError, RuntimeError, ValueError, grpc.RpcError) as error:
        sys.exit(f"inter_token.py: {error}")
