"""Watches the memory of every service over many requests: it must not grow."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from typing import Annotated
from urllib.parse import urlsplit

import typer
from drive import run_load
from load import Load
from processes import own_suite, resident_bytes, suite_of
from report import machine
from rich.console import Console
from rich.table import Table

SETTLE_S = 3.0

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def nothing() -> None:
    """Memory needs no window."""


@app.command()
def memory(
    url: Annotated[str, typer.Option(help="gateway of a local `sluice up`")] = "http://127.0.0.1:8000",
    up: Annotated[bool, typer.Option("--up", help="start a suite of its own and watch that")] = False,
    model: Annotated[str, typer.Option(help="served model name")] = "tekken",
    first: Annotated[int, typer.Option(min=1, help="requests before the first look")] = 2_000,
    last: Annotated[int, typer.Option(min=2, help="requests before the second look")] = 20_000,
    streams: Annotated[int, typer.Option(min=1, help="requests under way at once")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="tokens of every answer")] = 16,
    words: Annotated[int, typer.Option(min=1, help="words of every prompt")] = 30,
    limit: Annotated[float, typer.Option(help="ratio above which the exit code is 1")] = 1.05,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Compare resident memory of every service after `first` and after `last` requests."""
    if first >= last:
        raise typer.BadParameter("--first must be below --last")
    with own_suite(2, 1000.0) if up else nullcontext(url) as target:
        where = urlsplit(target)
        services = suite_of(where.port or 80)
        if not services:
            raise RuntimeError(f"no `sluice up` of this machine serves {target}")
        looks = []
        errors = 0
        for count in (first, last - first):
            load = Load(
                host=where.hostname or "127.0.0.1",
                port=where.port or 80,
                model=model,
                streams=streams,
                requests=count,
                tokens=tokens,
                words=words,
                seed=time.time_ns(),
            )
            errors += sum(run_load(load, 1, nothing, nothing).errors.values())
            time.sleep(SETTLE_S)
            looks.append(resident_bytes(services))
    before, after = looks
    rows = {name: {"first": before[name], "last": after[name], "ratio": after[name] / before[name]} for name in before}
    if as_json:
        print(json.dumps({"machine": machine(), "errors": errors, "resident_bytes": rows}, indent=2))
    else:
        _show(rows, first, last, errors)
    raise typer.Exit(1 if errors or any(row["ratio"] > limit for row in rows.values()) else 0)


def _show(rows: dict[str, dict[str, float]], first: int, last: int, errors: int) -> None:
    table = Table(title=f"resident memory, MiB; {errors} errors")
    table.add_column("service")
    for title in (f"after {first:,}", f"after {last:,}", "ratio"):
        table.add_column(title, justify="right")
    for name, row in rows.items():
        table.add_row(name, f"{row['first'] / 2**20:.1f}", f"{row['last'] / 2**20:.1f}", f"{row['ratio']:.3f}")
    Console().print(table)


if __name__ == "__main__":
    try:
        app()
    except (OSError, RuntimeError) as error:
        sys.exit(f"memory.py: {error}")
