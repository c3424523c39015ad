"""Renders the screen of `sluice top`, cut to the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

MIN_SIZE = (60, 10)
"""Width and height of the terminal of `sluice top`; in a smaller one only the summary is shown."""
HEALTH = {"ok": "green", "draining": "yellow", "troubled": "yellow", "left": "dim"}
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 40
NARROW = 100


def summary(state: dict[str, Any]) -> str:
    """Returns a one-line summary."""
    rates, workers = state["rates"], state["workers"]
    healthy = sum(row["health"] == "ok" for row in workers)
    return (
        f"{rates['requests']:.1f} requests/s, {rates['output_tokens']:.0f} tokens/s, {rates['live']} in flight, "
        f"{rates['failed']:.1f} failed/s, {healthy} of {len(workers)} workers healthy"
    )


def frame(state: dict[str, Any], problem: str, width: int, height: int) -> RenderableType:
    """Returns the screen; a terminal that is too small gets the summary and the required size."""
    if not state:
        return Text(problem or "connecting")
    if width < MIN_SIZE[0] or height < MIN_SIZE[1]:
        small = f"The terminal has {width}×{height}; {MIN_SIZE[0]}×{MIN_SIZE[1]} is needed."
        return Group(*(Text(line) for line in (problem, summary(state), small) if line))
    parts: list[RenderableType] = [_head(state, problem, width)]
    left = height - 5
    workers = min(len(state["workers"]), max(left - 8, 3))
    parts += [Text(), _workers(state, workers, width)]
    rest = left - workers - 3
    if rest > 2:
        parts += [Text(), _requests(state["requests"], rest - 1, width)]
    return Group(*parts)


def _head(state: dict[str, Any], problem: str, width: int) -> RenderableType:
    lines = [Text.assemble(("Sluice ", "bold"), summary(state), no_wrap=True, overflow="ellipsis")]
    nodes = Text("", no_wrap=True, overflow="ellipsis")
    for name, node in state["nodes"].items():
        serving = len(node["serving"])
        nodes.append(f"{name} ", "" if serving else "bold red")
        total = serving + len(node["away"])
        count = f"{serving}  " if total == serving else f"{serving} of {total}  "
        nodes.append(count, "bold red" if not serving else "yellow" if total > serving else "green")
    for reason, times in state["degraded"].items():
        nodes.append(f"{reason} ×{times}  ", "yellow")
    history = state.get("history", {}).get("output_tokens", [])
    if history and width >= NARROW:
        nodes.append(sparks(history[-SPARK_WIDTH:]), "cyan")
    lines.append(nodes)
    if problem:
        lines.append(Text(problem, "bold red", no_wrap=True, overflow="ellipsis"))
    return Group(*lines)


def _workers(state: dict[str, Any], most: int, width: int) -> Table:
    table = Table("worker", "health", box=None, pad_edge=False, header_style="dim")
    for title in ("run", "wait", "req/s", "tok/s", "in use", "cached", "hits"):
        table.add_column(title, justify="right", no_wrap=True)
    if width >= NARROW:
        for title in ("role", "engine", "address"):
            table.add_column(title, no_wrap=True)
    rows = sorted(state["workers"], key=lambda row: (row["health"] == "ok", row["id"]))[:most]
    for row in rows:
        hits = row["hit_rate"]
        more = (row["role"], escape(row["engine"]), row["address"]) if width >= NARROW else ()
        table.add_row(
            escape(row["id"]),
            f"[{HEALTH.get(row['health'], 'bold red')}]{row['health']}[/]",
            str(max(row["running"], row["live"])),  # the worker's last report, or this gateway's own streams
            str(row["waiting"]),
            f"{row['requests_s']:.1f}",
            f"{row['tokens_s']:.0f}",
            f"{row['used']:.0%}",
            f"{row['cached']:.0%}",
            "–" if hits is None else f"{hits:.0%}",
            *more,
        )
    hidden = len(state["workers"]) - len(rows) + state["hidden_workers"]
    if hidden:
        table.caption = f"and {hidden} more"
    return table


def _requests(requests: Sequence[dict[str, Any]], most: int, width: int) -> Table:
    wide = width >= NARROW
    about = ("began", "model") if wide else ()
    table = Table("request", *about, "worker", box=None, pad_edge=False, header_style="dim")
    for title in ("tokenize", "route", "first", "rest", "prompt", "cached", "out"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for one in list(reversed(requests))[: max(most, 1)]:
        name = one["id"][-8:]
        began = datetime.fromtimestamp(one["began_unix_ms"] / 1000).strftime("%H:%M:%S")
        marks = [] if one["outcome"] == "finished" else [one["outcome"]]
        table.add_row(
            escape(name),
            *((began, escape(one["model"])) if wide else ()),
            escape(" → ".join(one["workers"])),
            *(f"{one[f'{stage}_ms']:.0f} ms" for stage in ("tokenize", "route", "first", "rest")),
            str(one["prompt_tokens"]),
            str(one["cached_tokens"]),
            str(one["output_tokens"]),
            escape(", ".join([*marks, *one["degraded"]])) or "finished",
        )
    return table


def sparks(values: Sequence[float]) -> str:
    """Returns a bar chart in one line of block characters."""
    most = max(values, default=0) or 1
    return "".join(SPARKS[min(int(value / most * (len(SPARKS) - 1) + 0.5), len(SPARKS) - 1)] for value in values)
