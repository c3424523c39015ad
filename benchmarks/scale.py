"""Many streams on one gateway, some of whose clients read slowly and some of which leave: what do the others notice?

The same load runs twice, first with well-behaved clients only, then with a share that is not. Both times the pauses
between reads of the well-behaved are kept; at the end nothing must be left of any stream, anywhere.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

import grpc
import httpx
import typer
import uvloop
from load import Load, build_requests
from processes import cpu_seconds, own_suite, resident_bytes, suite_of

from sluice.v1 import router_pb2, router_pb2_grpc

GONE_WITHIN_S = 60.0
SLOW_BYTES, SLOW_EVERY_S = 512, 1.0

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass
class Heard:
    """What the well-behaved clients saw."""

    pauses: array[float] = field(default_factory=lambda: array("d"))
    first: array[float] = field(default_factory=lambda: array("d"))
    whole: int = 0
    broken: int = 0
    why: Counter[str] = field(default_factory=Counter)

    def quantile(self, part: float) -> float:
        """Of the pauses, milliseconds."""
        ordered = sorted(self.pauses)
        return 1000 * ordered[int(part * (len(ordered) - 1))] if ordered else 0.0


async def patient(host: str, port: int, request: bytes, heard: Heard) -> None:
    """Reads as fast as it can, to the end."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    last, head, tail = time.perf_counter(), b"", b""
    begun = False
    while data := await reader.read(65536):
        now = time.perf_counter()
        (heard.pauses if begun else heard.first).append(now - last)
        begun, last, head = True, now, head or data[:400]
        tail = (tail + data)[-64:]
        if tail.endswith(b"0\r\n\r\n"):
            break
    if b"[DONE]" in tail:
        heard.whole += 1
    else:
        heard.broken += 1
        heard.why[head[:200].decode(errors="replace") or "nothing came"] += 1
    writer.close()


async def slow(host: str, port: int, request: bytes, until: asyncio.Event) -> None:
    """Takes a few hundred bytes a second."""
    reader, writer = await asyncio.open_connection(host, port, limit=SLOW_BYTES)
    writer.write(request)
    while not until.is_set() and await reader.read(SLOW_BYTES):  # noqa: ASYNC110
        await asyncio.sleep(SLOW_EVERY_S)
    writer.transport.abort()


async def leaver(host: str, port: int, request: bytes, after_s: float) -> None:
    """Goes away without a word."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    try:
        async with asyncio.timeout(after_s):
            while await reader.read(65536):
                pass
    except TimeoutError:
        pass
    writer.transport.abort()


async def run(load: Load, rude: float, lasts_s: float) -> Heard:
    """All streams at once; `rude` is the share that reads slowly, and the same share again leaves."""
    heard, over = Heard(), asyncio.Event()
    tasks, others = [], []
    for index, request in enumerate(build_requests(load, load.streams, f"rude-{rude}")):
        place = index / load.streams
        if place < rude:
            others.append(asyncio.create_task(slow(load.host, load.port, request, over)))
        elif place < 2 * rude:
            after_s = random.uniform(0, lasts_s)
            others.append(asyncio.create_task(leaver(load.host, load.port, request, after_s)))
        else:
            tasks.append(asyncio.create_task(patient(load.host, load.port, request, heard)))
    await asyncio.gather(*tasks)
    over.set()
    await asyncio.gather(*others, return_exceptions=True)
    return heard


async def left(url: str, router: str) -> dict[str, float]:
    """Streams of the gateway and bookings of the router that are still there after a while; none should be."""
    deadline = time.monotonic() + GONE_WITHIN_S
    async with httpx.AsyncClient(base_url=url) as client, grpc.aio.insecure_channel(router) as channel:
        while True:
            text = (await client.get("/metrics")).text
            streams = re.search(r"^sluice_gateway_live_streams(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
            loads = await router_pb2_grpc.RouterStub(channel).GetLoads(router_pb2.GetLoadsRequest())
            found = {
                "streams": float(streams[1]) if streams else -1.0,
                "reservations": float(sum(load.requests for load in loads.loads)),
            }
            if not any(found.values()) or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.2)


@app.command()
def scale(
    streams: Annotated[int, typer.Option(min=10, help="at once")] = 2000,
    tokens: Annotated[int, typer.Option(min=2, help="of every answer")] = 256,
    words: Annotated[int, typer.Option(min=1, help="of every prompt")] = 50,
    rude: Annotated[float, typer.Option(min=0, max=0.4, help="share that reads slowly; as many again leave")] = 0.1,
    speedup: Annotated[float, typer.Option(help="of the mock engine's clock")] = 1.0,
    server: Annotated[str, typer.Option(help="uvicorn or granian; by SLUICE_GATEWAY_HTTP_SERVER")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="how often both loads run; memory is compared to the first")] = 2,
) -> None:
    """Measure what rude clients do to the others, and what stays behind."""
    import os

    if server:
        os.environ["SLUICE_GATEWAY_HTTP_SERVER"] = server
    rows: list[dict[str, Any]] = []
    with own_suite(2, speedup) as url:
        where = urlsplit(url)
        services = suite_of(where.port or 80)
        gateway = {"gateway": services["gateway"]}
        command = services["router"].cmdline()
        router = command[command.index("--listen") + 1]
        load = Load(where.hostname or "127.0.0.1", where.port or 80, "tekken", streams, streams, tokens, words)
        for number in range(rounds):
            for share in (0.0, rude):
                started, spent = time.perf_counter(), cpu_seconds(gateway)["gateway"]
                heard = uvloop.run(run(load, share, 10.0))
                row = {
                    "round": number,
                    "rude": share,
                    "streams": streams,
                    "whole": heard.whole,
                    "broken": heard.broken,
                    "pause_p50_ms": round(heard.quantile(0.5), 1),
                    "pause_p99_ms": round(heard.quantile(0.99), 1),
                    "gateway_us_per_token": round(
                        1e6 * (cpu_seconds(gateway)["gateway"] - spent) / max(heard.whole * tokens, 1), 1
                    ),
                    "seconds": round(time.perf_counter() - started, 1),
                    "left": uvloop.run(left(url, router)),
                    "gateway_mib": round(resident_bytes(gateway)["gateway"] / 2**20, 1),
                }
                if heard.why:
                    row["why"] = heard.why.most_common(3)
                rows.append(row)
                print(json.dumps(row), flush=True)
    if any(row["broken"] or any(row["left"].values()) for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    try:
        app()
    except (OSError, RuntimeError) as error:
        sys.exit(f"scale.py: {error}")
