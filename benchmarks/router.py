"""Measures the router: its own code in this process, and its decisions over gRPC in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import nullcontext
from random import Random
from typing import Annotated, Any

import typer
from redis import Redis
from report import machine, percentiles_ms
from rich.console import Console
from rich.table import Table
from router_local import apply_rate, hash_rates, match_rates, view_bytes_per_block
from router_remote import Caller, Herd, make_documents, own_redis, own_router

SEED = 7
AT_ONCE = 16
WORKERS = [8, 100, 1000]
LENGTHS = [1_000, 8_000, 32_000, 100_000]
STORES = ["memory", "redis"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


async def ask_all(
    workers: int, lengths: list[int], redis: Redis | None, rate: float, for_s: float, console: Console
) -> list[dict[str, Any]]:
    """Every length, by hashes and by token ids, over one number of workers in one store."""
    random = Random(SEED)
    documents = make_documents(random, lengths)
    store = "memory" if redis is None else "redis"
    before = 0 if redis is None else redis.info("memory")["used_memory"]
    rows = []
    async with own_router(redis) as (stub, process):
        herd = Herd(stub, workers)
        started = time.perf_counter()
        await herd.attach(random, [each for group in documents.values() for each in group])
        console.print(f"{workers} workers, {herd.blocks:,} blocks in {store}: {time.perf_counter() - started:.1f} s")
        per_block = 0.0 if redis is None else (redis.info("memory")["used_memory"] - before) / herd.blocks
        for length in lengths:
            for by_hashes in (True, False):
                caller = Caller(stub, documents[length], by_hashes)
                await caller.at_rate(rate, min(for_s, 1))  # warm-up
                seconds = await caller.at_rate(rate, for_s)
                decided = await caller.decision_seconds(len(seconds))
                nothing = await caller.at_rate(rate, min(for_s, 1), caller.do_nothing)
                used = sum(process.cpu_times()[:2])
                answers, took = await caller.as_fast_as_possible(for_s / 2, AT_ONCE)
                row = {
                    "store": store,
                    "workers": workers,
                    "tokens": length,
                    "by": "hashes" if by_hashes else "token ids",
                    "ms": percentiles_ms(seconds),
                    "decision_ms": percentiles_ms(decided),
                    "empty_rpc_ms": percentiles_ms(nothing),
                    "per_s": answers / took,
                    "router_cpu_us": 1e6 * (sum(process.cpu_times()[:2]) - used) / answers,
                    "store_bytes_per_block": per_block,
                }
                rows.append(row)
        herd.detach()
    return rows


def local_table(rows: list[dict[str, Any]]) -> Table:
    """In-process figures."""
    table = Table(title="in process")
    for title in ("what", "workers", "blocks", "µs", "per s"):
        table.add_column(title, justify="left" if title == "what" else "right")
    for row in rows:
        workers = str(row["workers"]) if row["workers"] else "–"
        table.add_row(row["what"], workers, f"{row['blocks']:,}", f"{row['us']:.1f}", f"{row['per_s']:,.0f}")
    return table


def remote_table(rows: list[dict[str, Any]], rate: float) -> Table:
    """Figures of decisions."""
    table = Table(title=f"RouteQuery with booking; latency at {rate:g}/s, then {AT_ONCE} at once")
    for title in (
        "store",
        "workers",
        "tokens",
        "by",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "decision",
        "empty RPC",
        "per s",
        "CPU µs",
    ):
        table.add_column(title, justify="left" if title in ("store", "by") else "right")
    for row in rows:
        times = [f"{value:.2f}" for value in row["ms"].values()]
        parts = [f"{row[key]['p50']:.2f} / {row[key]['p99']:.2f}" for key in ("decision_ms", "empty_rpc_ms")]
        speed = [f"{row['per_s']:,.0f}", f"{row['router_cpu_us']:,.0f}"]
        table.add_row(row["store"], f"{row['workers']:,}", f"{row['tokens']:,}", row["by"], *times, *parts, *speed)
    return table


@app.command()
def router(
    workers: Annotated[list[int], typer.Option(min=1, help="numbers of workers, repeated")] = WORKERS,
    tokens: Annotated[list[int], typer.Option(min=16, help="prompt lengths, repeated")] = LENGTHS,
    store: Annotated[list[str], typer.Option(help="memory, redis, repeated")] = STORES,
    rate: Annotated[float, typer.Option(min=1, help="queries a second while latency is measured")] = 200,
    seconds: Annotated[float, typer.Option(min=0.1, help="time of each measurement")] = 5,
    local: Annotated[bool, typer.Option(help="also measure in this process")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Measures what a decision costs."""
    console = Console(stderr=as_json)
    figures: dict[str, Any] = {"machine": machine()}
    if local:
        random = Random(SEED)
        figures["local"] = [*match_rates(random), apply_rate(random), *hash_rates(random)]
        figures["view_bytes_per_block"] = view_bytes_per_block(random)
        console.print(local_table(figures["local"]))
        console.print(f"{figures['view_bytes_per_block']:.0f} bytes a block in the view")
    figures["remote"] = rows = []
    for kind in store:
        for count in workers:
            with own_redis() if kind == "redis" else nullcontext() as redis:
                rows += asyncio.run(ask_all(count, tokens, redis, rate, seconds, console))
    if rows:
        console.print(remote_table(rows, rate))
        per_block = max(row["store_bytes_per_block"] for row in rows)
        console.print(f"{per_block:.0f} bytes a block in Redis" if per_block else "")
    if as_json:
        json.dump(figures, sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    app()
