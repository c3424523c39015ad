"""A fleet of routers, workers and gateways on one Redis or a cluster, and what each of its parts uses."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil
from growth_fleet import BLOCK_SIZE, DOCUMENT_BLOCKS, document, new_blocks, worker_name
from redis import Redis

from services.common.net.ports import free_port
from services.common.types.hashing import HASH_SCHEME
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.backends.workers.registry import WorkerRegistry
from services.gateway.core.request import TokenizedPrompt
from services.router.state.store.base import StoreUnavailable
from services.router.state.store.redis import RedisStore
from services.router.state.workers.worker import WorkerRank
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.redis_topologies import RedisCluster

FLEET = Path(__file__).with_name("growth_fleet.py")
WITHIN_S = 300.0
SESSION_TTL_MS = 3_600_000
HELD_S = 0.2
"""From a route until the request has ended."""
EXCHANGES = ("evalsha", "eval", "xread")
"""Commands that routers send; scripts run the others."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a fleet is; `masters`: 1 for a single Redis, else a cluster."""

    workers: int = 100
    routers: int = 1
    gateways: int = 8
    blocks: int = 1_000_000
    sessions: int = 10_000
    per_s: int = 200
    models: int = 1
    masters: int = 1

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:,}" for name, value in asdict(self).items())

    @property
    def model_names(self) -> list[str]:
        """Names of the models; workers and requests are spread over them."""
        return [f"model-{number}" for number in range(self.models)]


@dataclass(frozen=True, slots=True)
class Usage:
    """What the parts have used since they started.

    Attributes:
        redis_s: CPU seconds of each server.
        routers_s: CPU seconds of all routers.
        gateways_s: CPU seconds of the gateways' part in routing, all in one process, with what makes their requests.
        commands: that Redis executed for a router, scripts counted once.
        received, sent: bytes, by all servers of Redis.
    """

    at: float
    redis_s: tuple[float, ...]
    routers_s: float
    gateways_s: float
    commands: int
    received: int
    sent: int


class GatewayRouting:
    """The part of a gateway that knows the routers: queries, reports, and the list of workers."""

    def __init__(self, name: str, routers: Sequence[str]) -> None:
        self.client = RouterClient(routers, None, 20, name)
        self.workers = WorkerRegistry(self.client.replicas, lambda entry: None, lambda worker_id: None, name)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connects; `ready` tells when it is done."""
        await self.client.replicas.start()
        self._tasks = [asyncio.create_task(self.workers.run()), asyncio.create_task(self.client.run_reports())]

    def ready(self, routers: int, workers: int) -> bool:
        """Returns whether it is connected to all routers and knows all workers."""
        return len(self.client.replicas.serving) == routers and len(self.workers.workers) == workers

    async def close(self) -> None:
        """Disconnects."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.replicas.close()


class Place:
    """A running fleet."""

    def __init__(self, scale: Scale, redis: Sequence[RedisServer], routers: Sequence[psutil.Process]) -> None:
        self.scale = scale
        self.gateways: list[GatewayRouting] = []
        self.fleet: asyncio.subprocess.Process | None = None
        self._redis = redis
        self._routers = routers
        self._own = psutil.Process()
        self._random = Random(7)
        self._asked = 0

    async def request(self, seconds: list[float]) -> None:
        """Routes a request, lets its worker compute it, and ends it; appends how long the route took."""
        self._asked += 1
        number, scale = self._asked, self.scale
        beginning = self._random.randrange(scale.blocks // DOCUMENT_BLOCKS)
        seed = f"{id(self)}-{number}"
        prompt = TokenizedPrompt(b"", document(beginning) + new_blocks(seed), HASH_SCHEME, b"", b"", 0, b"")
        client = self.gateways[number % scale.gateways].client
        # A worker holds documents of its own number, modulo all workers, and so of one model.
        model = scale.model_names[beginning % scale.workers % scale.models]
        session = f"session-{number % scale.sessions}" if scale.sessions else ""
        started = time.perf_counter()
        route = await client.route(
            f"request-{number}", model, prompt, BLOCK_SIZE, expected_output_tokens=64, session_id=session
        )
        seconds.append(time.perf_counter() - started)
        assert self.fleet is not None
        assert self.fleet.stdin is not None
        self.fleet.stdin.write(f"{int(route.worker_id.rpartition('-')[2])} {seed}\n".encode())
        await asyncio.sleep(HELD_S / 4)
        client.prefill_complete(route.reservation_id)
        await asyncio.sleep(HELD_S)
        client.free(route.reservation_id, DOCUMENT_BLOCKS * BLOCK_SIZE, 64)

    async def run(self, for_s: float) -> list[float]:
        """Sends requests at fixed times, whatever the answers take; returns how long each route took, in seconds."""
        seconds: list[float] = []
        started = time.perf_counter()
        async with asyncio.TaskGroup() as requests:
            for number in range(int(self.scale.per_s * for_s)):
                await asyncio.sleep(max(started + number / self.scale.per_s - time.perf_counter(), 0))
                requests.create_task(self.request(seconds))
        return seconds

    async def known_to_all(self, workers: int) -> None:
        """Waits until every gateway is connected to all routers and knows so many workers."""
        deadline = time.monotonic() + WITHIN_S
        while not all(gateway.ready(self.scale.routers, workers) for gateway in self.gateways):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the gateways do not know all {workers} workers within {WITHIN_S:g} s")
            await asyncio.sleep(0.1)

    def usage(self) -> Usage:
        """Returns what the parts have used so far."""
        commands = received = sent = 0
        for server in self._redis:
            with Redis(port=server.port) as client:
                figures: dict[str, Any] = client.info("all")
            commands += sum(figures.get(f"cmdstat_{name}", {}).get("calls", 0) for name in EXCHANGES)
            received += figures["total_net_input_bytes"]
            sent += figures["total_net_output_bytes"]
        return Usage(
            time.perf_counter(),
            tuple(sum(psutil.Process(server.pid).cpu_times()[:2]) for server in self._redis),
            sum(sum(router.cpu_times()[:2]) for router in self._routers),
            sum(self._own.cpu_times()[:2]),
            commands,
            received,
            sent,
        )

    @property
    def router_bytes(self) -> int:
        """Resident memory of one router."""
        return max(int(router.memory_info().rss) for router in self._routers)

    @property
    def redis_bytes(self) -> int:
        """Resident memory of the largest server of Redis."""
        return max(int(psutil.Process(server.pid).memory_info().rss) for server in self._redis)


@asynccontextmanager
async def place(scale: Scale) -> AsyncIterator[Place]:
    """Starts a fleet and fills it; ends it afterwards."""
    async with AsyncExitStack() as stack:
        servers, url = stack.enter_context(_redis(scale.masters))
        ports = [free_port() for _ in range(scale.routers)]
        routers = [psutil.Process(stack.enter_context(_router(port, url)).pid) for port in ports]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        running = Place(scale, servers, routers)
        await _remember_sessions(scale, url)
        # Before the first channel is opened: gRPC's threads may not survive a fork.
        running.fleet = await stack.enter_async_context(fleet(scale, addresses))
        for number in range(scale.gateways):
            gateway = GatewayRouting(f"gateway-{number}", addresses)
            await gateway.start()
            stack.push_async_callback(gateway.close)
            running.gateways.append(gateway)
        await running.known_to_all(scale.workers)
        yield running


@contextmanager
def _redis(masters: int) -> Iterator[tuple[list[RedisServer], str]]:
    with tempfile.TemporaryDirectory() as folder:
        if masters == 1:
            server = RedisServer(Path(folder))
            try:
                server.start()
                yield [server], server.url
            finally:
                server.stop()
            return
        cluster = RedisCluster(Path(folder), masters)
        try:
            cluster.start()
            yield cluster.nodes, cluster.url
        finally:
            cluster.stop()


@contextmanager
def _router(port: int, redis_url: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "services.router", "--listen", f"127.0.0.1:{port}", "--log-level", "warning"]
    router = subprocess.Popen([*command, "--redis-timeout-s", "5", "--redis-url", redis_url])
    try:
        yield router
    finally:
        router.terminate()
        router.wait(WITHIN_S)


@asynccontextmanager
async def fleet(scale: Scale, routers: Sequence[str], port: int = 0) -> AsyncIterator[asyncio.subprocess.Process]:
    """Attaches workers, which hold their blocks then; with `port`, gateways can connect to them."""
    options = ["--port", str(port)]
    options += ["--workers", str(scale.workers), "--blocks", str(scale.blocks)]
    options += [part for address in routers for part in ("--router", address)]
    options += [part for model in scale.model_names for part in ("--model", model)]
    pipe = asyncio.subprocess.PIPE
    workers = await asyncio.create_subprocess_exec(sys.executable, str(FLEET), *options, stdin=pipe, stdout=pipe)
    try:
        assert workers.stdout is not None
        if (line := await asyncio.wait_for(workers.stdout.readline(), WITHIN_S)) != b"ready\n":
            raise RuntimeError(f"the workers could not attach: {line.decode()!r}, exit code {await workers.wait()}")
        yield workers
    finally:
        if workers.returncode is None:
            workers.terminate()
        await workers.wait()


async def _found(store: RedisStore, model: str) -> None:
    """Waits until the store knows which server of a cluster has a model, which it learns from a refusal."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            await store.session(model, "")
        except StoreUnavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)
        else:
            return


async def _remember_sessions(scale: Scale, url: str) -> None:
    store = RedisStore(url, timeout_s=30)
    try:
        for model in scale.model_names:
            await _found(store, model)
        for first in range(0, scale.sessions, 1_000):
            numbers = range(first, min(first + 1_000, scale.sessions))
            calls = (
                store.remember_session(
                    scale.model_names[number % scale.models],
                    f"session-{number}",
                    WorkerRank(worker_name(number % scale.workers), 0),
                    SESSION_TTL_MS,
                )
                for number in numbers
            )
            await asyncio.gather(*calls)
    finally:
        await store.close()
