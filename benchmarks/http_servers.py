"""uvicorn against granian: the same load on a suite of each, in turns, so that other work on the machine hits both."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import typer
from load import Load
from processes import own_suite, suite_of
from report import machine
from serve import MOST_WARMUP, measure

SERVERS = ("uvicorn", "granian")


class Size(NamedTuple):
    """A load, and how much faster than an engine's pace the mock engines run."""

    streams: int
    requests: int
    tokens: int
    speedup: float = 1000.0


LOADS = {
    "stream1": Size(1, 200, 128),
    "streams256": Size(256, 1024, 128),
    "streams2048": Size(2048, 4096, 64),
    "requests": Size(64, 2048, 2),  # hardly any tokens: what a request costs
    "pace": Size(256, 1024, 128, speedup=1.0),  # every token is an event, except when the services lag
}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def compare(
    rounds: Annotated[int, typer.Option(min=1, help="of every load with every server")] = 3,
    words: Annotated[int, typer.Option(min=1, help="of every prompt")] = 50,
    loads: Annotated[str, typer.Option(help="which, separated by commas")] = ",".join(LOADS),
) -> None:
    """Print the figures of every round, then the medians of each load and granian's CPU relative to uvicorn's."""
    print(json.dumps(machine()))
    chosen = {name: LOADS[name] for name in loads.split(",")}
    for speedup in sorted({size.speedup for size in chosen.values()}):
        with ExitStack() as suites:
            urls = {server: suites.enter_context(_suite(server, speedup)) for server in SERVERS}
            for name, size in chosen.items():
                if size.speedup == speedup:
                    _take_turns(name, size, urls, rounds, words)


def _suite(server: str, speedup: float) -> AbstractContextManager[str]:
    os.environ["SLUICE_GATEWAY_HTTP_SERVER"] = server
    return own_suite(2, speedup)


def _take_turns(name: str, size: Size, urls: dict[str, str], rounds: int, words: int) -> None:
    seen: dict[str, list[dict[str, Any]]] = {server: [] for server in urls}
    for number in range(rounds):
        for server in sorted(urls, reverse=number % 2 == 0):
            row = _measured(name, size, urls[server], words)
            seen[server].append(row)
            print(json.dumps({"server": server, "load": name, **row}), flush=True)
    cpu = {server: _median(rows, "gateway_us_per_token") for server, rows in seen.items()}
    for server, rows in seen.items():
        medians = {key: round(_median(rows, key), 2) for key, value in rows[0].items() if not isinstance(value, dict)}
        ratio = round(cpu[server] / cpu["uvicorn"], 2)
        print(json.dumps({"median of": server, "load": name, **medians, "ratio": ratio}), flush=True)


def _measured(name: str, size: Size, url: str, words: int) -> dict[str, Any]:
    port = urlsplit(url).port or 80
    load = Load(
        host="127.0.0.1",
        port=port,
        model="tekken",
        streams=size.streams,
        requests=size.requests,
        tokens=size.tokens,
        words=words,
        warmup=min(size.streams, MOST_WARMUP),
        seed=time.time_ns(),
    )
    row = measure(name, load, 1, suite_of(port))
    gateway = row["cpu_us_per_token"]["gateway"]
    return {
        "gateway_us_per_token": round(gateway, 1),
        "gateway_us_per_event": round(gateway / row["events_per_token"], 1),
        "gateway_us_per_request": round(gateway * size.tokens),
        "tokens_per_s": round(row["tokens_per_s"]),
        "first_text_p50_ms": round(row["first_text_ms"]["p50"], 1),
        "first_text_p99_ms": round(row["first_text_ms"]["p99"], 1),
        "pause_p99_ms": round(row["pause_ms"].get("p99", 0.0), 1),
        "events_per_token": round(row["events_per_token"], 2),
        "errors": row["errors"],
    }


def _median(rows: Sequence[dict[str, Any]], key: str) -> float:
    return float(statistics.median(row[key] for row in rows))


if __name__ == "__main__":
    try:
        app()
    except (OSError, RuntimeError, KeyError) as error:
        sys.exit(f"http_servers.py: {error}")
