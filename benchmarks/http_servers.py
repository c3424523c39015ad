"""uvicorn against granian under the same load, in turns, so that a machine's mood meets both."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Annotated
from urllib.parse import urlsplit

import typer
from load import Load
from processes import own_suite, suite_of
from report import machine
from serve import measure

SERVERS = ("uvicorn", "granian")
LOADS = {"1 stream": (1, 60, 128), "256 streams": (256, 1024, 128), "2,048 streams": (2048, 4096, 64)}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def compare(
    rounds: Annotated[int, typer.Option(min=1, help="of every load with every server")] = 3,
    words: Annotated[int, typer.Option(min=1, help="of every prompt")] = 50,
) -> None:
    """Measure both servers in turns."""
    print(json.dumps(machine()))
    for number in range(rounds):
        for server in SERVERS if number % 2 == 0 else SERVERS[::-1]:
            os.environ["SLUICE_GATEWAY_HTTP_SERVER"] = server
            with own_suite(2, 1000.0) as url:
                where = urlsplit(url)
                for name, (streams, requests, tokens) in LOADS.items():
                    load = Load(
                        host=where.hostname or "127.0.0.1",
                        port=where.port or 80,
                        model="tekken",
                        streams=streams,
                        requests=requests,
                        tokens=tokens,
                        words=words,
                        warmup=min(streams, 256),
                        seed=time.time_ns(),
                    )
                    row = measure(name, load, 1, suite_of(where.port or 80))
                    told = {
                        "server": server,
                        "load": name,
                        "gateway_us_per_token": round(row["cpu_us_per_token"]["gateway"], 1),
                        "tokens_per_s": round(row["tokens_per_s"]),
                        "first_text_ms": {key: round(value, 1) for key, value in row["first_text_ms"].items()},
                        "pause_p99_ms": round(row["pause_ms"].get("p99", 0.0), 1),
                        "events_per_token": round(row["events_per_token"], 2),
                        "errors": row["errors"],
                    }
                    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    try:
        app()
    except (OSError, RuntimeError) as error:
        sys.exit(f"http_servers.py: {error}")
