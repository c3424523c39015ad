"""What an innocent client notices of each attack on the gateway: `python benchmarks/attacks.py`.

Starts a suite, measures a client that asks for short answers at a steady pace, then does so again while each attack of
docs/security.md runs in a loop from a process of its own. Prints a table: the client's p50 and p99, how many times the
calm p99 that is, answers that failed, and the gateway's largest resident memory. The exit code is 1 when a p99 is over
five times the calm one, the gateway over 300 MiB, an innocent answer failed or a process ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from urllib.parse import urlsplit

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # the support of the tests starts the suite

from benchmarks.processes import suite_of
from tests.support.servers.suite import Suite

MODEL = "tekken"
PACE_S = 0.1
TOKENS = 16
MOST_TIMES = 5.0
MOST_MIB = 300
SAMPLE_S = 0.02
WAIT_S = 60
MIB = 1 << 20

Attack = Callable[[str, int], Awaitable[None]]


def _post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def _chat(**fields: object) -> bytes:
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], **fields}
    return _post("/v1/chat/completions", json.dumps(body).encode())


def _format(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


async def _answered(host: str, port: int, request: bytes) -> None:
    """Sends one request on a connection of its own and reads what comes, until the answer's end."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        async with asyncio.timeout(WAIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            await reader.readexactly(int(length[0][15:]) if length else 0)
    finally:
        writer.close()


def _repeated(request: bytes) -> Attack:
    async def attack(host: str, port: int) -> None:
        await _answered(host, port, request)

    return attack


def _deep_schema() -> object:
    return {"type": "object", "properties": {"x" * 218_000: {"properties": {str(i): {} for i in range(13_000)}}}}


async def _unfinished_bodies(host: str, port: int) -> None:
    """A hundred bodies of 9.9 MiB that never end; held for some seconds."""
    size = int(9.9 * MIB)
    head = _post("/v1/chat/completions", b"", f"content-length: {size}")

    async def one() -> None:
        _, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(head)
            for _ in range(99):
                writer.write(b" " * (size // 100))
                await writer.drain()
            await asyncio.sleep(5)
        finally:
            writer.close()

    async with asyncio.timeout(8):
        await asyncio.gather(*(one() for _ in range(100)), return_exceptions=True)


async def _pipelined(host: str, port: int) -> None:
    """Twenty-one megabytes of tiny requests on one connection, whose answers are read."""
    reader, writer = await asyncio.open_connection(host, port)
    request = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"

    async def read() -> None:
        while await reader.read(1 << 16):
            pass

    reading = asyncio.create_task(read())
    try:
        for _ in range(21 * MIB // (len(request) * 1000)):
            writer.write(request * 1000)
            await writer.drain()
    finally:
        reading.cancel()
        writer.close()


async def _trickled(host: str, port: int) -> None:
    """A body that goes on slowly after its request was refused."""
    _, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(_post("/nothing/here", b"", "content-length: 1000000"))
        for _ in range(50):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.1)
    finally:
        writer.close()


async def _trailers(host: str, port: int) -> None:
    """A chunked body with a megabyte of trailers."""
    body = b"2\r\n{}\r\n0\r\n" + b"x-trailer: " + b"a" * MIB + b"\r\n\r\n"
    await _answered(host, port, _post("/v1/chat/completions", body, "transfer-encoding: chunked"))


ATTACKS: dict[str, Attack] = {
    "A0 logprobs 0": _repeated(
        _post("/v1/completions", json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 4, "logprobs": 0}).encode())
    ),
    "A1 schema with long names": _repeated(_chat(response_format=_format(_deep_schema()))),
    "A2 patterns": _repeated(_chat(response_format=_format({"type": "string", "pattern": "[\x00-\U0010ffff]" * 800}))),
    "A3 unfinished bodies": _unfinished_bodies,
    "A4 a million biases": _repeated(_chat(logit_bias={str(i): 1 for i in range(400_000)})),
    "A4 a million messages": _repeated(_chat(messages=[0] * 3_000_000)),
    "A4 metadata": _repeated(_chat(metadata={str(i): "x" for i in range(400_000)})),
    "A5 trailers": _trailers,
    "A6 pipelined requests": _pipelined,
    "A7 bodies after a refusal": _trickled,
    "A8 model names of 9 MB": _repeated(_chat(model="m" * 9_000_000)),
}


@dataclass
class Innocent:
    """A client that asks for short answers at a steady pace, on a connection for each.

    Attributes:
        latencies: of whole answers, seconds.
        failed: answers that were not a 200 with all their tokens.
    """

    latencies: list[float] = field(default_factory=list)
    failed: int = 0

    async def ask_for(self, host: str, port: int, seconds: float) -> None:
        """Starts a request every PACE_S seconds, whatever the answers take."""
        asking, request = [], _chat(max_tokens=TOKENS, ignore_eos=True)
        for _ in range(round(seconds / PACE_S)):
            asking.append(asyncio.create_task(self._ask(host, port, request)))
            await asyncio.sleep(PACE_S)
        await asyncio.gather(*asking)

    async def _ask(self, host: str, port: int, request: bytes) -> None:
        began = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request)
                async with asyncio.timeout(WAIT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                    body = json.loads(await reader.readexactly(int(length[15:])))
                whole = b" 200 " in head[:20] and body["usage"]["completion_tokens"] == TOKENS
            finally:
                writer.close()
        except (OSError, TimeoutError, EOFError):
            whole = False
        self.failed += not whole
        self.latencies.append(time.perf_counter() - began)

    def quantile_ms(self, part: float) -> float:
        """A quantile of the latencies."""
        ordered = sorted(self.latencies)
        return 1000 * ordered[int(part * (len(ordered) - 1))]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    p50_ms: float
    p99_ms: float
    failed: int
    peak_mib: float


async def _measured(name: str, host: str, port: int, gateway: psutil.Process, seconds: float) -> Row:
    innocent, peak = Innocent(), 0
    asking = asyncio.create_task(innocent.ask_for(host, port, seconds))
    while not asking.done():
        peak = max(peak, gateway.memory_info().rss)
        await asyncio.sleep(SAMPLE_S)
    await asking
    return Row(name, innocent.quantile_ms(0.5), innocent.quantile_ms(0.99), innocent.failed, peak / MIB)


def _attacking(name: str, host: str, port: int, connections: int) -> None:
    """Runs one attack in a loop until the process is ended."""

    async def loop() -> None:
        while True:
            with suppress(OSError, TimeoutError, EOFError, asyncio.IncompleteReadError):
                await ATTACKS[name](host, port)
            await asyncio.sleep(0)

    async def all_of_them() -> None:
        await asyncio.gather(*(loop() for _ in range(connections)))

    asyncio.run(all_of_them())


def _attacked(name: str, host: str, port: int, gateway: psutil.Process, options: argparse.Namespace) -> Row:
    attacker: BaseProcess = multiprocessing.get_context("spawn").Process(
        target=_attacking, args=(name, host, port, options.connections), daemon=True
    )
    attacker.start()
    try:
        time.sleep(options.warm_up_s)
        return asyncio.run(_measured(name, host, port, gateway, options.seconds))
    finally:
        attacker.kill()
        attacker.join()


def _table(rows: list[Row]) -> str:
    calm = rows[0].p99_ms
    lines = [
        "| attack | p50 ms | p99 ms | times calm p99 | failed | gateway peak MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row.name} | {row.p50_ms:.1f} | {row.p99_ms:.1f} | {row.p99_ms / calm:.1f} | {row.failed} | "
        f"{row.peak_mib:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def _missed(rows: list[Row]) -> list[str]:
    calm = rows[0].p99_ms
    missed = []
    for row in rows:
        if row.p99_ms > MOST_TIMES * calm:
            missed.append(f"{row.name}: p99 is {row.p99_ms / calm:.1f} times the calm one")
        if row.peak_mib > MOST_MIB:
            missed.append(f"{row.name}: the gateway took {row.peak_mib:.0f} MiB")
        if row.failed:
            missed.append(f"{row.name}: {row.failed} innocent answers failed")
    return missed


def main() -> int:
    """Runs the attacks and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15, help="measured time of each attack (15)")
    parser.add_argument("--warm-up-s", type=float, default=2, help="time an attack runs before it is measured (2)")
    parser.add_argument("--connections", type=int, default=2, help="loops that run an attack at once (2)")
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    options = parser.parse_args()
    names = [name for name in ATTACKS if options.only in name]
    if not names:
        parser.error(f"--only matches none of: {', '.join(ATTACKS)}")
    with Suite("--speedup", "20") as suite:
        url = urlsplit(suite.url)
        assert url.hostname is not None
        assert url.port is not None
        processes: Mapping[str, psutil.Process] = suite_of(url.port)
        place = (url.hostname, url.port, processes["gateway"])
        asyncio.run(_measured("warm-up", *place, 3))
        rows = [asyncio.run(_measured("calm", *place, options.seconds))]
        for name in names:
            print(f"{name} …", file=sys.stderr, flush=True)
            rows.append(_attacked(name, *place, options))
        ended = [name for name, process in processes.items() if not process.is_running()]
    print(_table(rows))
    missed = _missed(rows) + [f"{name} ended" for name in ended]
    print("\n".join(missed) or "all within the limits", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
