"""Many streams on one gateway, some of whose clients read slowly and some of which leave: what do the others notice?

All streams run at once, in the workers too. Rounds with well-behaved clients only take turns with rounds in which a
share is not: what is compared is measured minutes apart on a machine in the same mood. At the end nothing must be left
of any stream in any service, and memory must be where it was after the first two rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
import uvloop
from leftovers import Places, address, grown, left
from load import Load, build_requests
from processes import cpu_seconds, own_suite, resident_bytes, suite_of
from rude import ObservedStream, leaver, patient, slow

from services.common.net.ports import free_port

MAX_RATIO = 1.5
MAX_GROWTH_MIB = 32.0

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


async def run(load: Load, rude: float, lasts_s: float) -> ObservedStream:
    """All streams at once; `rude` is the share that reads slowly, and the same share again leaves."""
    heard, over = ObservedStream(), asyncio.Event()
    patients, others = [], []
    for index, request in enumerate(build_requests(load, load.streams, f"rude-{rude}")):
        # Mixed, so that neither kind comes first.
        place = index * 7919 % load.streams / load.streams
        if place < rude:
            others.append(asyncio.create_task(slow(load.host, load.port, request, over)))
        elif place < 2 * rude:
            others.append(asyncio.create_task(leaver(load.host, load.port, request, random.uniform(0, lasts_s))))
        else:
            patients.append(asyncio.create_task(patient(load.host, load.port, request, heard)))
    await asyncio.gather(*patients)
    over.set()
    await asyncio.gather(*others, return_exceptions=True)
    return heard


def free_address() -> str:
    """host:port without a listener now."""
    return f"127.0.0.1:{free_port()}"


def environment(step_ms: float, streams: int, metrics: str) -> dict[str, str]:
    """Makes the workers run every stream at the same time."""
    return {
        "SLUICE_WORKER_ENGINE_ARGS": f"timing=fixed,fixed_step_ms={step_ms}",
        "SLUICE_WORKER_MAX_SEQUENCES": str(streams),
        "SLUICE_WORKER_TOTAL_BLOCKS": str(64 * streams),
        "SLUICE_POSTPROCESS_METRICS_LISTEN": metrics,
    }


@app.command()
def scale(
    streams: Annotated[int, typer.Option(min=10, help="at once")] = 2000,
    tokens: Annotated[int, typer.Option(min=2, help="of every answer")] = 128,
    words: Annotated[int, typer.Option(min=1, help="of every prompt")] = 50,
    rude: Annotated[float, typer.Option(min=0, max=0.4, help="share that reads slowly; as many again leave")] = 0.1,
    step_ms: Annotated[float, typer.Option(min=1, help="of the mock engine: every stream gets a token")] = 200.0,
    rounds: Annotated[int, typer.Option(min=1, help="pairs of a round without and one with rude clients")] = 3,
) -> None:
    """Measure what rude clients do to the others, and what stays behind."""
    metrics = free_address()
    os.environ |= environment(step_ms, streams, metrics)
    rows: list[dict[str, Any]] = []
    with own_suite(2, 1.0) as url:
        where = urlsplit(url)
        services = suite_of(where.port or 80)
        workers = tuple(address(services[name]) for name in services if name.startswith("worker"))
        places = Places(url, f"http://{metrics}", address(services["router"]), workers, services["gateway"])
        load = Load(where.hostname or "127.0.0.1", where.port or 80, "tekken", streams, streams, tokens, words)
        for number in range(rounds):
            for share in (0.0, rude):
                started, spent = time.perf_counter(), cpu_seconds(services)["gateway"]
                heard = uvloop.run(run(load, share, tokens * step_ms / 1000))
                row: dict[str, Any] = {
                    "round": number,
                    "rude": share,
                    "whole": heard.whole,
                    "broken": heard.broken,
                    "pause_p50_ms": round(heard.pause_ms(0.5), 1),
                    "pause_p99_ms": round(heard.pause_ms(0.99), 1),
                    "gateway_cpu_s": round(cpu_seconds(services)["gateway"] - spent, 1),
                    "seconds": round(time.perf_counter() - started, 1),
                    "left": uvloop.run(left(places)),
                }
                memory = resident_bytes(services)
                row["gateway_mib"] = round(memory["gateway"] / 2**20, 1)
                if heard.why:
                    row["why"] = heard.why.most_common(3)
                rows.append(row)
                print(json.dumps(row), flush=True)
            if number == 0:
                baseline = memory
    verdict = judged(rows, grown(baseline, memory))
    print(json.dumps(verdict), flush=True)
    if not all(verdict["holds"].values()):
        raise typer.Exit(1)


def judged(rows: list[dict[str, Any]], growth_mib: dict[str, float]) -> dict[str, Any]:
    """What came of it; the ratio is the median over the rounds, of each with rude clients to the one before it."""
    ratios = [
        rude["pause_p99_ms"] / max(polite["pause_p99_ms"], 1e-9)
        for polite, rude in zip(rows[::2], rows[1::2], strict=True)
    ]
    ratio = statistics.median(ratios)
    holds = {
        "every answer whole": not any(row["broken"] for row in rows),
        f"p99 within {MAX_RATIO}": ratio <= MAX_RATIO,
        "nothing left": not any(any(row["left"].values()) for row in rows),
        "memory back": max(growth_mib.values()) <= MAX_GROWTH_MIB,
    }
    return {"p99_ratios": [round(one, 2) for one in ratios], "grown_mib": growth_mib, "holds": holds}


if __name__ == "__main__":
    try:
        app()
    except (OSError, RuntimeError) as error:
        sys.exit(f"scale.py: {error}")
