"""What an innocent client notices of each attack on each entrance: `python benchmarks/attacks.py`.

Starts a suite with all entrances open and measures two innocent clients: one asks for short chats at a steady pace,
one asks RouteQuery. Then it measures them again while each attack (`attack_kinds.py`, `attack_fields.py`) runs in a
loop from a process of its own. Prints a table: both clients' p99, how many times the calm p99 that is, failures, the
growth of the process that grew most, and leases that were lost. The exit code is 1 when a p99 of chats is over five
times the calm one, RouteQuery's p99 over 100 ms, a process grew by over 150 MiB or ended, an innocent answer failed or
a lease was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # the support of the tests starts the suite

from attack_fields import FIELDS
from attack_kinds import ENGINE, ENTRANCES
from processes import suite_of

from services.common.base.packing import pack_u32
from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.clients.entrances import CHAT, Delivery, Target, post
from tests.support.servers.suite import Suite

MODEL = "tekken"
PACE_S = 0.1
TOKENS = 16
MAX_TIMES = 5.0
MAX_QUERY_MS = 100.0
MAX_GROWTH_MIB = 150
SAMPLE_S = 0.1
MIB = 1 << 20
WORKERS = ("worker-0", "worker-1")


def _attacks() -> dict[str, dict[str, Callable[[Target], Awaitable[None]]]]:
    return {**ENTRANCES, "HTTP, one request": FIELDS}


@dataclass
class Innocent:
    """A client that starts a request every PACE_S seconds, whatever the answers take.

    Attributes:
        latencies: of whole answers, seconds.
        failed: requests without the expected answer.
    """

    request: Callable[[], Awaitable[bool]]
    latencies: list[float] = field(default_factory=list)
    failed: int = 0

    async def run(self, seconds: float) -> None:
        """Sends requests for a time and waits for their answers."""
        tasks = []
        for _ in range(round(seconds / PACE_S)):
            tasks.append(asyncio.create_task(self._timed()))
            await asyncio.sleep(PACE_S)
        await asyncio.gather(*tasks)

    async def _timed(self) -> None:
        began = time.perf_counter()
        try:
            answered = await self.request()
        except (OSError, grpc.aio.AioRpcError, ValueError, KeyError):
            answered = False
        self.failed += not answered
        self.latencies.append(time.perf_counter() - began)

    def quantile_ms(self, part: float) -> float:
        """Returns a quantile of the latencies."""
        return 1000 * sorted(self.latencies)[int(part * (len(self.latencies) - 1))]


class Clients:
    """The innocent clients of one measurement, and the state of the leases."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._channel = open_channel(target.router)
        self._router = router_pb2_grpc.RouterStub(self._channel)
        self._body = json.dumps(
            {
                "model": MODEL,
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "messages": [{"role": "user", "content": "hi"}],
            }
        ).encode()
        self.chats = Innocent(self._chat)
        self.queries = Innocent(self._query)
        self.lost = 0

    async def run(self, seconds: float) -> None:
        """Runs the clients and watches the leases."""
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.gather(self.chats.run(seconds), self.queries.run(seconds))
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching  # raises what ended it early
            await self._channel.close()

    async def _chat(self) -> bool:
        status, body = await post(self._target.gateway, CHAT, self._body, Delivery())
        return status == "200" and json.loads(body)["usage"]["completion_tokens"] == TOKENS

    async def _query(self) -> bool:
        prompt = router_pb2.PromptRef(token_ids=pack_u32(range(512)))
        request = router_pb2.RouteQueryRequest(model=MODEL, prompt=prompt)
        return bool((await self._router.RouteQuery(request, timeout=30)).decode.worker_id)

    async def _watch(self) -> None:
        present = set(WORKERS)
        while True:
            with suppress(grpc.aio.AioRpcError):
                listed = await self._router.ListWorkers(router_pb2.ListWorkersRequest(), timeout=10)
                now = {worker.worker_id for worker in listed.workers} & set(WORKERS)
                self.lost += len(present - now)
                present = now
            await asyncio.sleep(0.2)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    entrance: str
    kind: str
    chat_p99_ms: float
    query_p99_ms: float
    failed: int
    grown: str
    growth_mib: float
    lost: int


def _resident(processes: Mapping[str, psutil.Process]) -> dict[str, int]:
    sizes = {}
    for name, process in processes.items():
        with suppress(psutil.Error):
            sizes[name] = process.memory_info().rss
    return sizes


async def _measured(
    entrance: str,
    kind: str,
    target: Target,
    processes: dict[str, psutil.Process],
    calm: Mapping[str, int],
    seconds: float,
) -> Row:
    clients, peaks = Clients(target), dict(calm)
    running = asyncio.create_task(clients.run(seconds))
    while not running.done():
        for name, size in _resident(processes).items():
            peaks[name] = max(peaks.get(name, 0), size)
        await asyncio.sleep(SAMPLE_S)
    await running
    growth = {name: (peak - calm.get(name, peak)) / MIB for name, peak in peaks.items()}
    grown = max(growth, key=lambda name: growth[name])
    failed = clients.chats.failed + clients.queries.failed
    chat_ms, query_ms = clients.chats.quantile_ms(0.99), clients.queries.quantile_ms(0.99)
    return Row(entrance, kind, chat_ms, query_ms, failed, grown, growth[grown], clients.lost)


def _attacking(entrance: str, kind: str, target: Target, loops: int) -> None:
    """Runs one attack in loops until the process is ended."""
    os.nice(19)  # it stands for other machines, so the work of the attacker itself is not what is measured

    async def loop() -> None:
        while True:
            with suppress(OSError, TimeoutError, EOFError, asyncio.IncompleteReadError, grpc.aio.AioRpcError):
                await _attacks()[entrance][kind](target)
            await asyncio.sleep(0.01)

    async def all_loops() -> None:
        await asyncio.gather(*(loop() for _ in range(loops)))

    asyncio.run(all_loops())


@contextmanager
def _engine_worker(target: Target, processes: dict[str, psutil.Process]) -> Iterator[None]:
    """Runs a worker whose engine is the server of the attack, and adds it to the processes."""
    name = "worker of the foreign engine"
    command = [sys.executable, "-m", "services.worker", "--engine", "http", "--listen", "127.0.0.1:0"]
    command += ["--engine-args", json.dumps({"url": f"http://127.0.0.1:{target.engine_port}"})]
    command += ["--worker-id", "foreign", "--routers", target.router, "--metrics-listen", "", "--model-name", "foreign"]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as worker:
        processes[name] = psutil.Process(worker.pid)
        try:
            yield
        finally:
            del processes[name]
            worker.kill()


def _attacked(
    entrance: str,
    kind: str,
    target: Target,
    processes: dict[str, psutil.Process],
    calm: dict[str, int],
    options: argparse.Namespace,
) -> Row:
    loops = 1 if entrance == ENGINE else options.loops
    attacker = multiprocessing.get_context("spawn").Process(
        target=_attacking, args=(entrance, kind, target, loops), daemon=True
    )
    attacker.start()
    try:
        time.sleep(options.warm_up_s)
        if entrance != ENGINE:
            return asyncio.run(_measured(entrance, kind, target, processes, calm, options.seconds))
        with _engine_worker(target, processes):
            time.sleep(options.warm_up_s)
            sizes = {**calm, "worker of the foreign engine": 90 * MIB}
            return asyncio.run(_measured(entrance, kind, target, processes, sizes, options.seconds))
    finally:
        attacker.kill()
        attacker.join()


def _table(rows: list[Row]) -> str:
    calm = rows[0].chat_p99_ms
    lines = [
        "| entrance | attack | chat p99 ms | × calm | RouteQuery p99 ms | failed | largest growth MiB | leases lost |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    lines += [
        f"| {row.entrance} | {row.kind} | {row.chat_p99_ms:.0f} | {row.chat_p99_ms / calm:.1f} | "
        f"{row.query_p99_ms:.0f} | "
        f"{row.failed} | {row.growth_mib:.0f} ({row.grown}) | {row.lost} |"
        for row in rows
    ]
    return "\n".join(lines)


def _missed(row: Row, calm: Row) -> Iterator[str]:
    name = f"{row.entrance}, {row.kind}"
    if row.chat_p99_ms > MAX_TIMES * calm.chat_p99_ms:
        yield f"{name}: p99 is {row.chat_p99_ms / calm.chat_p99_ms:.1f} times the calm one"
    if row.query_p99_ms > MAX_QUERY_MS:
        yield f"{name}: RouteQuery's p99 is {row.query_p99_ms:.0f} ms"
    if row.growth_mib > MAX_GROWTH_MIB:
        yield f"{name}: {row.grown} grew by {row.growth_mib:.0f} MiB"
    if row.failed:
        yield f"{name}: {row.failed} innocent requests failed"
    if row.lost:
        yield f"{name}: {row.lost} leases were lost"


@contextmanager
def open_suite() -> Iterator[tuple[Target, dict[str, psutil.Process]]]:
    """Runs a suite with every entrance open; provides their addresses and the processes."""
    twin, picker, engine = free_port(), free_port(), free_port()
    environment = {
        "SLUICE_ROUTER_HTTP_LISTEN": f"127.0.0.1:{twin}",
        "SLUICE_ROUTER_PICKER_LISTEN": f"127.0.0.1:{picker}",
    }
    with Suite("--speedup", "20", env=environment) as suite:
        url = urlsplit(suite.url)
        assert url.hostname is not None
        assert url.port is not None
        place = (url.hostname, url.port)
        target = Target(
            place, ("127.0.0.1", twin), f"127.0.0.1:{picker}", suite.address("router"), MODEL, engine_port=engine
        )
        yield target, suite_of(url.port)


def main() -> int:
    """Runs the attacks and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="measured time of each attack (20)")
    parser.add_argument("--warm-up-s", type=float, default=2, help="time an attack runs before it is measured (2)")
    parser.add_argument("--loops", type=int, default=2, help="loops that run an attack at once (2)")
    parser.add_argument("--only", action="append", help="attacks whose entrance and kind contain this; may be repeated")
    options = parser.parse_args()
    chosen = [
        (entrance, kind)
        for entrance, kinds in _attacks().items()
        for kind in kinds
        if any(part in f"{entrance}, {kind}" for part in options.only or [""])
    ]
    if not chosen:
        parser.error(f"--only matches none of: {', '.join(_attacks())}")
    with open_suite() as (target, processes):
        asyncio.run(_measured("", "warm-up", target, processes, {}, 3))
        calm = _resident(processes)
        rows = [asyncio.run(_measured("none", "calm", target, processes, calm, options.seconds))]
        for entrance, kind in chosen:
            rows.append(_attacked(entrance, kind, target, processes, calm, options))
            print(_table(rows).splitlines()[-1], file=sys.stderr, flush=True)
        ended = [name for name, process in processes.items() if not process.is_running()]
    print(_table(rows))
    missed = [line for row in rows[1:] for line in _missed(row, rows[0])] + [f"{name} ended" for name in ended]
    print("\n".join(missed) or "all within the limits", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
