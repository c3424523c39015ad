"""What the endpoint picker costs behind a real Envoy: latency, processor time, memory, and whether it overbooks.

    python benchmarks/picker.py [--loads 200x500,10000x50,100000x10] [--seconds 15] [--pickers 1] [--limit 0] [--kill]

Open-loop load of streamed chats: TOKENSxRATE is the length of the prompts and requests a second; nine in ten tokens of
a prompt are a prefix that it shares with others. Envoy (scripts/envoy.sh), the pickers, preprocess, Redis and the
endpoints are processes of their own on one machine; the client, which also sends the heartbeats of the workers, is this
process. The same load runs through an Envoy without the picker first; the difference is what the picker adds. With
--limit, endpoints may have that many requests at a time, and the endpoints count how many they have: the exit code is 1
if one has more, or if bookings are left. --naive gives every picker a store of its own, as pickers without shared
bookings have, and must show overbookings.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import psutil
import typer
import uvloop
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from prompt_text import Text

from services.common.net.ports import free_port
from sluice.v1 import router_pb2
from tests.support.servers.envoy import Envoy
from tests.support.servers.http_upstream import RESET, STATS
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.router_child import RouterChild
from tests.support.servers.router_cluster import MODEL, FakeWorker

ROOT = Path(__file__).parents[1]
SHARED = 0.9
PREFIXES = 8
PATH = b"/v1/chat/completions"
HEAD = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@dataclass
class Outcome:
    """Latencies to the first byte of an answer, seconds, and answers by status."""

    first_s: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)

    def ms(self, share: float) -> float:
        """Returns a quantile in milliseconds."""
        ordered = sorted(self.first_s) or [0.0]
        return 1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class Connection(asyncio.Protocol):
    """A kept-alive connection, with one request at a time; cheaper than streams, whose cost would be measured too."""

    def __init__(self) -> None:
        self.closed = False
        self._received = b""
        self._length = -1
        self._first_s = 0.0
        self._answer: asyncio.Future[tuple[int, float]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, float]]:
        """Sends a request; the result is the status of its answer and when the first byte arrived."""
        self._received, self._length, self._first_s = b"", -1, 0.0
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        """Takes a part of an answer."""
        self._received += data
        received = self._received
        if not self._first_s:
            end = received.find(b"\r\n\r\n")
            if end < 0:
                return
            self._first_s = time.perf_counter()
            found = re.search(rb"(?i)\r\ncontent-length: (\d+)", received[: end + 2])
            self._length = -1 if found is None else end + 4 + int(found[1])
        whole = received.endswith(b"\r\n0\r\n\r\n") if self._length < 0 else len(received) >= self._length
        if whole and self._answer is not None and not self._answer.done():
            self._answer.set_result((int(received[9:12]), self._first_s))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fails a request under way."""
        self.closed = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError())


class Client:
    """Sends requests over kept-alive connections."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []

    async def ask(self, request: bytes, outcome: Outcome) -> None:
        """Sends a request and records its latency and status."""
        started = time.perf_counter()
        try:
            connection = await self._connection()
            status, first_s = await connection.ask(request)
            self._idle.append(connection)
        except OSError:
            status, first_s = 0, 0.0
        outcome.statuses[status] = outcome.statuses.get(status, 0) + 1
        if status == 200:
            outcome.first_s.append(first_s - started)

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        _, made = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self._port)
        return made

    def close(self) -> None:
        """Closes all connections."""
        for each in self._idle:
            each.transport.close()


def bodies(tokens: int, count: int) -> list[bytes]:
    """Returns requests with chats of about this many tokens, which share prefixes."""
    text = Text(1)
    prefixes = [text.of_tokens(int(tokens * SHARED)) for _ in range(PREFIXES)]
    rest = [text.of_tokens(max(tokens - int(tokens * SHARED), 8)) for _ in range(16)]
    made = []
    for number in range(count):
        messages = [
            {"role": "system", "content": prefixes[number % PREFIXES]},
            {"role": "user", "content": f"{number} {rest[number % len(rest)]}"},
        ]
        body = json.dumps({"model": MODEL, "messages": messages, "stream": True}).encode()
        made.append(HEAD % (PATH, len(body)) + body)
    return made


async def drive(port: int, load: tuple[int, float], seconds: float, made: list[bytes]) -> Outcome:
    """Sends requests at a rate for a time, whatever becomes of them."""
    outcome, client, draw = Outcome(), Client(port), random.Random(2)
    running: set[asyncio.Task[None]] = set()
    started = time.perf_counter()
    number, due = 0, started
    while due < started + seconds:
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        task = asyncio.create_task(client.ask(made[number % len(made)], outcome))
        running.add(task)
        task.add_done_callback(running.discard)
        number += 1
        due += draw.expovariate(load[1])
    await asyncio.wait_for(asyncio.gather(*running), 60)
    client.close()
    return outcome


class House:
    """All processes of a measurement."""

    def __init__(self, endpoints: list[str], pickers: list[RouterChild], envoys: list[Envoy]) -> None:
        self.endpoints, self.pickers, self.envoys = endpoints, pickers, envoys
        self.processes: dict[str, psutil.Process] = {}

    async def bookings(self) -> int:
        """Returns the requests booked at all pickers."""
        loads = [(await each.stub.GetLoads(router_pb2.GetLoadsRequest())).loads for each in self.pickers if each.alive]
        return sum(load.requests for each in loads for load in each)

    async def left(self) -> int:
        """Returns the requests that stay booked."""
        for _ in range(100):
            if not (booked := await self.bookings()):
                return 0
            await asyncio.sleep(0.2)
        return booked

    async def most(self) -> list[int]:
        """Returns the most requests that each endpoint had at a time."""
        return [(await stats_of(each))["most"] for each in self.endpoints]


async def stats_of(endpoint: str, path: str = STATS) -> Any:
    """Returns what an endpoint has counted; with RESET, it counts anew from now on."""
    host, _, port = endpoint.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    found = json.loads(await reader.readexactly(length))
    writer.close()
    return found


@asynccontextmanager
async def house(count: int, pickers: int, limit: int, hold_ms: float, naive: bool) -> AsyncIterator[House]:
    """Starts everything.

    Args:
        count: number of endpoints.
        limit: most requests of an endpoint; 0: any number.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = RedisServer(folder)
        redis.start()
        stack.callback(redis.stop)
        ports = [free_port() for _ in range(count)]
        listed = ",".join(map(str, ports))
        upstream = [sys.executable, "-m", "tests.support.servers.http_upstream", "--ports", listed]
        servers = stack.enter_context(_process([*upstream, "--hold-ms", str(hold_ms)]))
        tokenizer = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "services.preprocess", "--listen", tokenizer, "--metrics-listen", ""]
        command += ["--models", f"{MODEL}=mistral-common:tekken_240911", "--log-level", "warning"]
        preprocess = stack.enter_context(_process(command))
        flags = ["--preprocess", tokenizer, "--drain-s", "1", "--owner-lease-ms", "2000"]
        flags += ["--busy-requests", str(limit)] if limit else []
        flags += [] if naive else ["--redis-url", redis.url]
        listens = [f"127.0.0.1:{free_port()}" for _ in range(pickers)]
        children = [RouterChild(folder, *flags, "--picker-listen", listen) for listen in listens]
        for child in children:
            await child.start()
            stack.push_async_callback(child.stop)
        endpoints = [f"127.0.0.1:{port}" for port in ports]
        await _attach(children if naive else children[-1:], endpoints, stack)
        envoys = [Envoy(folder, [], endpoints), Envoy(folder, listens, endpoints)]
        for envoy in envoys:
            await asyncio.to_thread(envoy.start)
            stack.callback(envoy.stop)
        found = House(endpoints, children, envoys)
        found.processes = {
            "envoy": psutil.Process(envoys[1].pid),
            "preprocess": psutil.Process(preprocess.pid),
            "redis": psutil.Process(redis.pid),
            "endpoints": psutil.Process(servers.pid),
            "client": psutil.Process(),
            **{f"picker {number}": psutil.Process(child.pid) for number, child in enumerate(children, 1)},
        }
        yield found


async def _attach(children: list[RouterChild], endpoints: list[str], stack: AsyncExitStack) -> None:
    for child in children:
        for number, endpoint in enumerate(endpoints):
            worker = FakeWorker(f"w{number}")
            worker.registration.http_address = endpoint
            await worker.attach(child)
            worker.keep_beating()
            stack.push_async_callback(worker.detach)


@contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command while the context is open."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def _cpu(processes: dict[str, psutil.Process]) -> dict[str, float]:
    found = {}
    for name, process in processes.items():
        try:
            family = [process, *(() if name == "client" else process.children(recursive=True))]
            found[name] = sum(sum(each.cpu_times()[:2]) for each in family)
        except psutil.NoSuchProcess:
            found[name] = 0.0
    return found


async def measure(found: House, load: tuple[int, float], seconds: float, kill: bool) -> dict[str, Any]:
    """Returns the figures of one load: through an Envoy without the picker, then with it."""
    made = bodies(load[0], min(max(int(load[1] * 4), 64), 2_000))
    bare, picked = found.envoys
    await drive(picked.port, (load[0], min(load[1], 50)), 3, made[: PREFIXES * 4])  # fills tokenizer caches
    without = await drive(bare.port, load, seconds / 2, made)
    for endpoint in found.endpoints:
        await stats_of(endpoint, RESET)
    before = _cpu(found.processes)
    running = asyncio.create_task(drive(picked.port, load, seconds, made))
    if kill:
        await asyncio.sleep(seconds / 2)
        await found.pickers[0].kill()
    outcome = await running
    used = {name: after - before[name] for name, after in _cpu(found.processes).items()}
    answered = max(sum(outcome.statuses.values()), 1)
    return {
        "load": f"{load[0]:,} tokens × {load[1]:g}/s",
        "without": without,
        "with": outcome,
        "most": await found.most(),
        "cpu_ms": {name: 1000 * seconds_used / answered for name, seconds_used in used.items()},
        "rss_mib": {
            name: process.memory_info().rss / (1 << 20)
            for name, process in found.processes.items()
            if process.is_running()
        },
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Prints the figures."""
    table = Table(title="first byte through Envoy, milliseconds")
    for name in ("load", "without p50 / p95", "with p50 / p95 / p99", "added p50 / p95", "statuses"):
        table.add_column(name)
    for row in rows:
        bare, picked = row["without"], row["with"]
        added = " / ".join(f"{picked.ms(share) - bare.ms(share):.2f}" for share in (0.5, 0.95))
        table.add_row(
            row["load"],
            " / ".join(f"{bare.ms(share):.2f}" for share in (0.5, 0.95)),
            " / ".join(f"{picked.ms(share):.2f}" for share in (0.5, 0.95, 0.99)),
            added,
            str(picked.statuses),
        )
    console.print(table)
    cost = Table(title="processor time per request, milliseconds, and memory, MiB")
    cost.add_column("load")
    names = list(rows[0]["cpu_ms"])
    for name in names:
        cost.add_column(name)
    for row in rows:
        cells = [f"{row['cpu_ms'][name]:.2f} · {row['rss_mib'].get(name, 0):.0f}" for name in names]
        cost.add_row(row["load"], *cells)
    console.print(cost)


async def _main(
    loads: list[tuple[int, float]],
    seconds: float,
    pickers: int,
    endpoints: int,
    limit: int,
    hold: float,
    flags: set[str],
) -> int:
    console = Console(width=150)
    rows = []
    async with house(endpoints, pickers, limit, hold, "naive" in flags) as found:
        for load in loads:
            console.print(f"{load[0]:,} tokens × {load[1]:g}/s …")
            rows.append(await measure(found, load, seconds, "kill" in flags))
        show(rows, console)
        left = await found.left()
        most = max(max(row["most"]) for row in rows)
        console.print(f"most requests of an endpoint at a time: {most}, limit {limit or 'none'}; bookings left: {left}")
        overbooked = bool(limit) and most > limit
        if overbooked:
            console.print("[bold red]overbooked[/]")
        return int(overbooked or bool(left))


def main(
    loads: Annotated[str, typer.Option(help="TOKENSxRATE, comma-separated")] = "200x500,10000x50,100000x10",
    seconds: Annotated[float, typer.Option(help="duration of each load, seconds")] = 15.0,
    pickers: Annotated[int, typer.Option(help="number of pickers")] = 1,
    endpoints: Annotated[int, typer.Option(help="number of endpoints")] = 4,
    limit: Annotated[int, typer.Option(help="most requests of an endpoint at a time; 0: any number")] = 0,
    hold_ms: Annotated[float, typer.Option(help="time before the first byte of an answer, milliseconds")] = 0.0,
    kill: Annotated[bool, typer.Option("--kill", help="kill a picker in the middle of each load")] = False,
    naive: Annotated[bool, typer.Option("--naive", help="give every picker a store of its own")] = False,
) -> None:
    """Measures the endpoint picker behind a real Envoy."""
    parsed = [(int(each.partition("x")[0]), float(each.partition("x")[2])) for each in loads.split(",")]
    flags = {name for name, on in (("kill", kill), ("naive", naive)) if on}
    raise SystemExit(uvloop.run(_main(parsed, seconds, pickers, endpoints, limit, hold_ms, flags)))


if __name__ == "__main__":
    typer.run(main)
