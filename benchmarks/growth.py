"""What a query costs as a fleet grows, and which part saturates first: `python benchmarks/growth.py`.

Starts real routers on a Redis (or a cluster of three masters), workers that hold blocks, heartbeat and send events, and
the part of gateways that knows routers: their queries, their reports and their lists of workers. Each dimension grows
alone, the others stay as they are by default; `full` is all of them at once. A fleet is measured without requests,
which is what it costs a second, and with them, and the difference is what a query costs. From both follows how many
queries a second keep a part busy: Redis has one core, and so has each router. No point needs that many, so all of it
fits on a small machine: that is what is extrapolated, and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1]))  # the support of the tests starts Redis

import typer
import uvloop
from growth_gateway import gateway_table, measured_gateway
from growth_place import Place, Scale, Usage, place
from report import machine, percentiles_ms

from sluice.cli.sizing.line_plot import Panel, plot

Row: TypeAlias = dict[str, Any]

BASE = Scale()
FULL = Scale(workers=1_000, routers=8, gateways=64, blocks=10_000_000, sessions=100_000)
DIMENSIONS: Mapping[str, Sequence[int]] = {
    "workers": (10, 100, 300, 1_000),
    "routers": (1, 2, 4, 8),
    "gateways": (1, 8, 64),
    "blocks": (10_000, 100_000, 1_000_000, 10_000_000),
    "sessions": (0, 1_000, 10_000, 100_000),
    "per_s": (50, 100, 200, 400),
}
GATEWAY = (0, 100, 1_000)
"""Workers of other models that a gateway process knows."""
CLUSTER = (replace(BASE, masters=3), replace(BASE, masters=3, models=12))
KNOWN = (*DIMENSIONS, "cluster", "gateway", "full")
TARGET_PER_S = 5_000
SETTLE_S = 3.0
PARTS = ("Redis", "routers", "gateways")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


async def measured(scale: Scale, seconds: float) -> Row:
    """Returns what a fleet of this size costs."""
    async with place(scale) as running:
        await running.run(SETTLE_S)
        await asyncio.sleep(SETTLE_S)
        marks = [running.usage()]
        await asyncio.sleep(seconds)
        marks.append(running.usage())
        routed = await running.run(seconds)
        marks.append(running.usage())
        return {**asdict(scale), "ms": percentiles_ms(routed), **_costs(running, marks, len(routed))}


def _costs(running: Place, marks: Sequence[Usage], queries: int) -> Row:
    """Returns costs a second without requests, and of a query, from usage before, between and after."""
    scale = running.scale
    idle = _difference(*marks[:2])
    busy = _difference(*marks[1:])
    seconds = {key: value / idle["at"] for key, value in idle.items()}
    query = {key: (value - seconds[key] * busy["at"]) / queries for key, value in busy.items()}
    per_s = {
        "Redis": (1 - seconds["redis_s"]) / query["redis_s"],
        "routers": scale.routers * (1 - seconds["routers_s"] / scale.routers) / query["routers_s"],
    }
    return {
        "idle_cores": {"Redis": seconds["redis_s"], "a router": seconds["routers_s"] / scale.routers},
        "idle_commands_per_s": seconds["commands"],
        "idle_redis_sent_per_s": seconds["sent"],
        "query_us": {
            "Redis": 1e6 * query["redis_s"],
            "routers": 1e6 * query["routers_s"],
            "gateways": 1e6 * query["gateways_s"],
        },
        "query_commands": query["commands"],
        "query_bytes": {"to Redis": query["received"], "from Redis": query["sent"]},
        "saturates_per_s": per_s,
        "mib": {"a router": running.router_bytes / 2**20, "Redis": running.redis_bytes / 2**20},
    }


def _difference(before: Usage, after: Usage) -> dict[str, float]:
    """Returns what was used in between; of several servers of Redis, the one that used the most."""
    redis = max(new - old for old, new in zip(before.redis_s, after.redis_s, strict=True))
    fields = ("at", "routers_s", "gateways_s", "commands", "received", "sent")
    return {"redis_s": redis, **{name: getattr(after, name) - getattr(before, name) for name in fields}}


def scales(dimensions: Sequence[str]) -> Iterator[tuple[str, Scale]]:
    """Yields the fleets to measure, and what grows in them."""
    for dimension in dimensions:
        if dimension == "full":
            yield dimension, FULL
        elif dimension == "cluster":
            yield from ((dimension, scale) for scale in CLUSTER)
        else:
            yield from ((dimension, replace(BASE, **{dimension: value})) for value in DIMENSIONS[dimension])


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of a table in Markdown."""
    yield (
        "| what grows | workers | routers | gateways | blocks | sessions | queries/s | models, masters | "
        "without requests: Redis, a router | a query: Redis, routers, gateways | commands | bytes to, from Redis | "
        "p50 / p99 ms | MiB: Redis, a router | saturated at: Redis, routers |"
    )
    yield "| --- |" + " ---: |" * 14
    for row in rows:
        idle, query, sent = row["idle_cores"], row["query_us"], row["query_bytes"]
        cells = [row["grows"], *(f"{row[name]:,}" for name in DIMENSIONS), f"{row['models']}, {row['masters']}"]
        cells.append(f"{idle['Redis']:.1%}, {idle['a router']:.1%} of a core")
        cells.append(", ".join(f"{query[part]:,.0f}" for part in PARTS) + " µs")
        cells.append(f"{row['query_commands']:.1f}")
        cells.append(f"{sent['to Redis']:,.0f}, {sent['from Redis']:,.0f}")
        cells.append(f"{row['ms']['p50']:.1f} / {row['ms']['p99']:.1f}")
        cells.append(f"{row['mib']['Redis']:,.0f}, {row['mib']['a router']:,.0f}")
        cells.append(", ".join(f"{value:,.0f}/s" for value in row["saturates_per_s"].values()))
        yield f"| {' | '.join(cells)} |"


def verdict(row: Row) -> str:
    """Returns which part saturates first."""
    part, per_s = min(row["saturates_per_s"].items(), key=lambda item: item[1])
    enough = "above" if per_s >= TARGET_PER_S else "below"
    return f"{part} saturates first, at {per_s:,.0f} queries a second, {enough} the {TARGET_PER_S:,} aimed at."


def drawn(rows: Sequence[Row]) -> str:
    """Returns an SVG document with a diagram for each dimension."""
    panels = []
    for dimension in DIMENSIONS:
        points = sorted((row for row in rows if row["grows"] == dimension), key=lambda row: int(row[dimension]))
        lines = {
            part: [(max(float(row[dimension]), 1.0), max(float(row["query_us"][part]), 1.0)) for row in points]
            for part in PARTS
        }
        if points:
            panels.append(Panel("CPU of a query, µs", dimension.replace("per_s", "queries a second"), lines))
    return plot(panels, columns=3)


@app.command()
def main(
    dimension: Annotated[
        list[str] | None,
        typer.Option(help="workers, routers, gateways, blocks, sessions, per_s, cluster, full; repeated"),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="of each measurement, without and with requests")] = 10.0,
    svg: Annotated[Path | None, typer.Option(help="draw into this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Measure what a query costs as a fleet grows."""
    dimensions = dimension or KNOWN
    if unknown := set(dimensions) - set(KNOWN):
        print(f"Unknown dimension {', '.join(sorted(unknown))}; choose from {', '.join(KNOWN)}.", file=sys.stderr)
        raise typer.Exit(2)
    gateways: list[Row] = []
    for workers in GATEWAY if "gateway" in dimensions else ():
        print(f"a gateway that knows {workers} workers of other models", file=sys.stderr, flush=True)
        gateways.append(asyncio.run(measured_gateway(workers, seconds)))
    rows: list[Row] = []
    for grows, scale in scales([name for name in dimensions if name != "gateway"]):
        print(f"{grows}: {scale}", file=sys.stderr, flush=True)
        rows.append({"grows": grows, **uvloop.run(measured(scale, seconds))})
        print(list(table(rows[-1:]))[-1], file=sys.stderr, flush=True)
    if svg is not None:
        svg.write_text(drawn(rows))
    if as_json:
        print(json.dumps({"machine": machine(), "rows": rows, "gateways": gateways}, indent=2))
        return
    print("\n".join([*table(rows), "", *gateway_table(gateways)]))
    for row in rows:
        if row["grows"] == "full":
            print(f"\n{verdict(row)}")


if __name__ == "__main__":
    app()
