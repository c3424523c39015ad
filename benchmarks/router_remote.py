"""A router process with many workers attached, asked over gRPC."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import grpc
import psutil
from redis import Redis, RedisError
from router_local import BLOCK_SIZE

from services.common.base.packing import pack_u32, pack_u64
from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from services.common.types.hashing import HASH_SCHEME, block_hashes
from sluice.v1 import common_pb2, router_pb2, router_pb2_grpc

MODEL = "benchmark"
SHARED_BLOCKS = 32  # a system prompt, at the beginning of every prompt and on every worker
HOLDERS = 8  # workers that hold a prompt beyond that
PROMPTS = 20  # of each length
LEASE_MS = 600_000
WITHIN_S = 60.0
BUNDLED_REDIS = Path(__file__).parents[1] / ".venv" / "opt" / "redis" / "bin" / "redis-server"


@dataclass(frozen=True, slots=True)
class Document:
    """A prompt in both forms; `tokens` and `hashes` are packed."""

    tokens: bytes
    hashes: bytes


@contextmanager
def own_redis() -> Iterator[Redis]:
    """A redis-server of our own without persistence."""
    binary, port = shutil.which("redis-server") or str(BUNDLED_REDIS), free_port()
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as server,
    ):
        client = Redis(port=port)
        try:
            _until_it_answers(client, server)
            yield client
        finally:
            client.close()
            server.terminate()


def _until_it_answers(client: Redis, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            client.ping()
        except RedisError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("redis-server did not start") from error
            time.sleep(0.05)
        else:
            return


@asynccontextmanager
async def own_router(redis: Redis | None) -> AsyncIterator[tuple[router_pb2_grpc.RouterAsyncStub, psutil.Process]]:
    """A router of our own; gives its stub and its process."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "services.router", "--listen", address, "--lease-ms", str(LEASE_MS)]
    command += ["--log-level", "warning"]
    if redis is not None:
        command += ["--redis-url", f"redis://127.0.0.1:{redis.get_connection_kwargs()['port']}/0"]
    router = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: ASYNC220 - nothing else runs yet
    channel = open_channel(address)
    try:
        await asyncio.wait_for(channel.channel_ready(), WITHIN_S)
        stub = router_pb2_grpc.RouterStub(channel)
        await _until_ready(stub)
        yield stub, psutil.Process(router.pid)
    finally:
        await channel.close()
        router.terminate()
        await asyncio.to_thread(router.wait, WITHIN_S)


async def _until_ready(stub: router_pb2_grpc.RouterAsyncStub) -> None:
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            await stub.GetLoads(router_pb2.GetLoadsRequest())
        except grpc.aio.AioRpcError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)
        else:
            return


def make_documents(random: Random, lengths: Sequence[int]) -> dict[int, list[Document]]:
    """Prompts by their length in tokens; all begin alike."""
    system = array("I", (random.randrange(128_000) for _ in range(SHARED_BLOCKS * BLOCK_SIZE)))
    documents: dict[int, list[Document]] = {}
    for length in lengths:
        for _ in range(PROMPTS):
            tokens = system + array("I", random.randbytes(4 * max(length - len(system), 0)))
            tokens = tokens[:length]
            hashes = block_hashes(tokens, BLOCK_SIZE)
            documents.setdefault(length, []).append(Document(pack_u32(tokens), pack_u64(hashes)))
    return documents


class Herd:
    """Workers attached to a router; each holds what it was told to."""

    def __init__(self, stub: router_pb2_grpc.RouterAsyncStub, count: int) -> None:
        self._stub = stub
        self._names = [f"worker-{number:04}" for number in range(count)]
        self._calls: dict[str, Any] = {}
        self.blocks = 0

    async def attach(self, random: Random, documents: Sequence[Document]) -> None:
        """Attaches all of them and waits until what they hold is durable."""
        await asyncio.gather(*map(self._register, self._names))
        held: dict[str, list[bytes]] = {name: [] for name in self._names}
        for document in documents:
            whole = len(document.hashes) // 8
            for name in random.sample(self._names, min(HOLDERS, len(self._names))):
                held[name].append(document.hashes[: 8 * random.randint(min(SHARED_BLOCKS, whole), whole)])
        system = documents[0].hashes[: 8 * SHARED_BLOCKS]
        for name, parts in held.items():
            await self._store(name, [system, *parts])

    async def _register(self, name: str) -> None:
        call = self._calls[name] = self._stub.Attach()
        card = common_pb2.ModelCard(
            model=MODEL,
            block_size=BLOCK_SIZE,
            hash_scheme=HASH_SCHEME,
            total_blocks=1 << 20,
            capabilities=["kv_events"],
        )
        registration = router_pb2.Registration(worker_id=name, address=f"{name}:50051", epoch=1, card=card)
        await call.write(router_pb2.AttachRequest(registration=registration))
        await asyncio.wait_for(call.read(), WITHIN_S)

    async def _store(self, name: str, parts: Sequence[bytes]) -> None:
        call = self._calls[name]
        for sequence, part in enumerate(parts, 1):
            event = router_pb2.KvEvent(stored=router_pb2.BlocksStored(block_hashes=part))
            batch = router_pb2.KvEventBatch(sequence=sequence, events=[event])
            await call.write(router_pb2.AttachRequest(events=batch))
        acked = 0
        while acked < len(parts):
            acked = (await asyncio.wait_for(call.read(), WITHIN_S)).ack.sequence
        self.blocks += len({part[at : at + 8] for part in parts for at in range(0, len(part), 8)})

    def detach(self) -> None:
        """All processes end."""
        for call in self._calls.values():
            call.cancel()


class Caller:
    """Asks for workers and frees what it got, a batch at a time."""

    def __init__(self, stub: router_pb2_grpc.RouterAsyncStub, documents: Sequence[Document], by_hashes: bool) -> None:
        self._stub = stub
        self._documents = documents
        self._by_hashes = by_hashes
        self._asked = 0
        self._taken: list[str] = []
        self.seconds: list[float] = []
        self.overlaps = 0

    async def ask(self) -> None:
        """One decision with booking."""
        self._asked += 1
        document = self._documents[self._asked % len(self._documents)]
        prompt = (
            router_pb2.PromptRef(block_hashes=document.hashes, block_size=BLOCK_SIZE)
            if self._by_hashes
            else router_pb2.PromptRef(token_ids=document.tokens)
        )
        request = router_pb2.RouteQueryRequest(
            mode=router_pb2.RouteQueryRequest.MODE_SELECT_AND_RESERVE,
            request_id=f"{id(self)}-{self._asked}",
            model=MODEL,
            prompt=prompt,
        )
        started = time.perf_counter()
        answer = await self._stub.RouteQuery(request)
        self.seconds.append(time.perf_counter() - started)
        self.overlaps += answer.overlap.device_blocks > 0
        self._taken.append(answer.reservation_id)
        if len(self._taken) >= 32:
            await self.free()

    async def do_nothing(self) -> None:
        """The cheapest RPC there is: what gRPC and this machine take anyway."""
        started = time.perf_counter()
        await self._stub.MarkPrefillComplete(router_pb2.MarkPrefillCompleteRequest())
        self.seconds.append(time.perf_counter() - started)

    async def decision_seconds(self, most: int) -> list[float]:
        """How long the router says its last decisions took, Redis' round trip included."""
        answer = await self._stub.GetDecisions(router_pb2.GetDecisionsRequest(model=MODEL, limit=most))
        return [decision.decision_us / 1e6 for decision in answer.decisions]

    async def free(self) -> None:
        """Gives back what was booked."""
        taken, self._taken = self._taken, []
        await self._stub.FreeRequest(router_pb2.FreeRequestRequest(reservation_ids=taken))

    async def at_rate(
        self, per_s: float, for_s: float, step: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> list[float]:
        """Asks at fixed times, whatever the answers take; returns the seconds each took."""
        self.seconds = []
        started = time.perf_counter()
        async with asyncio.TaskGroup() as asking:
            for number in range(int(per_s * for_s)):
                await asyncio.sleep(max(started + number / per_s - time.perf_counter(), 0))
                asking.create_task((step or self.ask)())
        await self.free()
        return self.seconds.copy()

    async def as_fast_as_possible(self, for_s: float, at_once: int) -> tuple[int, float]:
        """Asks in a closed loop; returns how many answers came in how many seconds."""
        before, started = len(self.seconds), time.perf_counter()

        async def keep_asking() -> None:
            while time.perf_counter() - started < for_s:
                await self.ask()

        async with asyncio.TaskGroup() as asking:
            for _ in range(at_once):
                asking.create_task(keep_asking())
        took = time.perf_counter() - started
        await self.free()
        return len(self.seconds) - before, took
