"""Routers and fake workers for tests: real gRPC servers in this process, on free ports."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr

from services.common.base.packing import pack_u64
from services.common.base.tasks import Stop
from services.common.rpc.channels import open_channel
from services.router.__main__ import serve
from services.router.settings import RouterSettings
from sluice.v1 import common_pb2, router_pb2, router_pb2_grpc
from tests.support.waiting import until

MODEL = "tekken"
BLOCK = 16


class RouterProcess:
    """One router replica."""

    def __init__(self, **settings: Any) -> None:
        if "redis_url" in settings:
            settings["redis_url"] = SecretStr(settings["redis_url"])
        self.settings = RouterSettings(listen="127.0.0.1:0", **settings)
        self._stop = Stop()

    async def start(self) -> None:
        """Starts and waits until it listens."""
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(serve(self.settings, self._stop, listening))
        self.port = await asyncio.wait_for(listening, 20)
        self.channel = open_channel(f"127.0.0.1:{self.port}")
        self.stub = router_pb2_grpc.RouterStub(self.channel)

    async def ready(self) -> None:
        """Waits until it has reached its store."""
        health = health_pb2_grpc.HealthStub(self.channel)

        async def serves() -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=20)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        await until(serves)

    async def stop(self) -> None:
        """Drains and ends; fails when the router had failed before."""
        self._stop.set()
        await asyncio.wait_for(self._serving, 20)
        await self.channel.close(5)  # calls that the router has ended still read how
        assert not self._stop.failed


@asynccontextmanager
async def routers(count: int = 1, **settings: Any) -> AsyncIterator[list[RouterProcess]]:
    """Replicas, stopped at the end."""
    replicas = [RouterProcess(**settings) for _ in range(count)]
    for replica in replicas:
        await replica.start()
    try:
        yield replicas
    finally:
        await asyncio.gather(*(replica.stop() for replica in replicas))


class HasStub(Protocol):
    """A router, in this process or another."""

    @property
    def stub(self) -> Any: ...


class FakeWorker:
    """Speaks Attach the way a worker does; its cache is a list of batches.

    Args:
        same_as: another attachment of the same process.
        card: fields of the model card.
    """

    def __init__(
        self,
        worker_id: str,
        epoch: int = 1,
        total_blocks: int = 100_000,
        same_as: FakeWorker | None = None,
        **card: Any,
    ) -> None:
        card = {"model": MODEL, "block_size": BLOCK, "hash_scheme": "sluice-xxh3-v1", **card}
        self.registration: router_pb2.Registration = router_pb2.Registration(
            worker_id=worker_id,
            address=f"{worker_id}.test:50051",
            epoch=epoch,
            card=common_pb2.ModelCard(total_blocks=total_blocks, **card),
            engine="fake",
            lease_key=same_as.registration.lease_key if same_as else secrets.token_bytes(16),
        )
        self.worker_id = worker_id
        self.cache: set[int] = set()
        self.sequence = 0
        self.acked = 0
        self.attached: router_pb2.Attached | None = None
        self.resyncs: list[str] = []
        self.ended: grpc.aio.AioRpcError | None = None
        self._writing = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None

    async def attach(self, router: HasStub) -> None:
        """Opens the stream; returns when the router has answered."""
        self.call = router.stub.Attach()
        await self.write(router_pb2.AttachRequest(registration=self.registration))
        first = await asyncio.wait_for(self.call.read(), 20)
        if first is grpc.aio.EOF:
            raise AssertionError("the router ended the stream")
        self.attached = first.attached
        self._listening = asyncio.create_task(self._listen())

    async def write(self, message: router_pb2.AttachRequest) -> None:
        async with self._writing:  # a call takes one write at a time
            await self.call.write(message)

    async def _listen(self) -> None:
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                if message.WhichOneof("message") == "ack":
                    self.acked = message.ack.sequence
                else:
                    self.resyncs.append(message.resync.reason)
                    await self.snapshot()
        except grpc.aio.AioRpcError as error:
            self.ended = error

    async def store(self, hashes: Any, wait: bool = True) -> None:
        """Caches blocks and says so; waits until that is durable."""
        self.cache.update(hashes)
        self.sequence += 1
        await self.send(self.sequence, hashes)
        if wait:
            await until(lambda: self.acked >= self.sequence)

    async def send(self, sequence: int, hashes: Any) -> None:
        """Sends an event batch as it is."""
        stored = router_pb2.BlocksStored(block_hashes=pack_u64(hashes), tier=common_pb2.CACHE_TIER_DEVICE)
        batch = router_pb2.KvEventBatch(sequence=sequence, events=[router_pb2.KvEvent(stored=stored)])
        await self.write(router_pb2.AttachRequest(events=batch))

    async def snapshot(self) -> None:
        """Sends everything it holds, in two chunks."""
        hashes = sorted(self.cache)
        middle = len(hashes) // 2
        for part, last in ((hashes[:middle], False), (hashes[middle:], True)):
            chunk = router_pb2.Snapshot(sequence=self.sequence, block_hashes=pack_u64(part), last=last)
            await self.write(router_pb2.AttachRequest(snapshot=chunk))

    async def heartbeat(self, **load: Any) -> None:
        """Reports its load."""
        beat = router_pb2.Heartbeat(loads=[common_pb2.WorkerLoad(**load)])
        await self.write(router_pb2.AttachRequest(heartbeat=beat))

    def keep_beating(self) -> None:
        """Sends heartbeats as often as the router asked, until detached."""
        assert self.attached is not None
        self._beating = asyncio.create_task(self._beat(self.attached.heartbeat_interval_ms / 1000))

    async def _beat(self, every_s: float) -> None:
        while self.ended is None:
            await self.heartbeat()
            await asyncio.sleep(every_s)

    async def leave(self) -> None:
        """Takes no new requests."""
        await self.write(router_pb2.AttachRequest(leave=router_pb2.Leave(reason="test")))

    async def detach(self) -> None:
        """Its process is gone."""
        if self._beating is not None:
            self._beating.cancel()
        self.call.cancel()
        await asyncio.wait([self._listening])
