"""A worker and its router over real gRPC: the lease, cache events, snapshots, moving on to another router, goodbye."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.common.base.packing import unpack_u64
from services.common.net.ports import free_port
from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from services.common.types.hashing import block_hashes
from services.worker.kv_events import event_log as cache_log
from services.worker.server import WorkerServer
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.servers.workers import generation, hosted, stub_of
from tests.support.waiting import until


class RouterLog(router_pb2_grpc.RouterServicer):
    """A router that only listens, and keeps the index it is told, strictly by sequence number."""

    def __init__(self) -> None:
        self.registrations: list[router_pb2.Registration] = []
        self.heartbeats: list[router_pb2.Heartbeat] = []
        self.leaves: list[str] = []
        self.snapshots = 0
        self.batches = 0
        self.sequence = 0
        self.present: set[int] = set()
        self.holds: dict[int, int] = {}
        self.lost = 0
        self._assembling: set[int] = set()
        self._streams: list[Any] = []

    async def Attach(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        first = await context.read()
        self.registrations.append(first.registration)
        self._streams.append(context)
        await context.write(
            router_pb2.AttachResponse(
                attached=router_pb2.Attached(lease_ms=3000, heartbeat_interval_ms=50, sequences=self.holds)
            )
        )
        try:
            while isinstance(message := await context.read(), router_pb2.AttachRequest):
                self._hear(message)
        finally:
            self.lost += 1

    async def ask_for_snapshot(self) -> None:
        """The router says that it missed something."""
        await self._streams[-1].write(router_pb2.AttachResponse(resync=router_pb2.ResyncRequest(reason="a test")))

    def _hear(self, message: router_pb2.AttachRequest) -> None:
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            self.heartbeats.append(message.heartbeat)
        elif kind == "leave":
            self.leaves.append(message.leave.reason)
        elif kind == "snapshot":
            self._assembling.update(unpack_u64(message.snapshot.block_hashes))
            if message.snapshot.last:
                self.snapshots += 1
                self.present, self._assembling = self._assembling, set()
                self.sequence = message.snapshot.sequence
        elif kind == "events":
            assert message.events.sequence == self.sequence + 1, "a hole in the sequence"
            self.sequence = message.events.sequence
            self.batches += 1
            for event in message.events.events:
                self._apply(event)

    def _apply(self, event: router_pb2.KvEvent) -> None:
        if event.HasField("stored"):
            self.present.update(unpack_u64(event.stored.block_hashes))
        elif event.HasField("removed"):
            self.present.difference_update(unpack_u64(event.removed.block_hashes))
        else:
            self.present.clear()


def router_log() -> RouterLog:
    return RouterLog()  # type: ignore[abstract]  # has only the call that workers make


@asynccontextmanager
async def router(log: RouterLog, port: int = 0) -> AsyncIterator[GrpcServer]:
    """Serves a log as a router."""
    server = GrpcServer(GrpcServiceSettings(listen=f"127.0.0.1:{port}"), router_pb2.DESCRIPTOR)
    router_pb2_grpc.add_RouterServicer_to_server(log, server.server)
    await server.start()
    await server.set_serving(True)
    try:
        yield server
    finally:
        await server.stop(0)


async def say(host: WorkerServer, name: str, prompt: range) -> None:
    async with stub_of(host) as stub:
        async for _ in stub.Generate(generation(name, prompt, max_tokens=1)):
            pass


def cached(host: WorkerServer) -> int:
    return host.engine.load()[0].cached_blocks


async def test_a_worker_registers_reports_and_streams_its_cache(folder: Path) -> None:
    log = router_log()
    async with router(log) as server, hosted(folder, routers=[f"127.0.0.1:{server.port}"], worker_id="w1") as host:
        await until(lambda: len(log.heartbeats) >= 2)
        (registration,) = log.registrations
        assert registration.worker_id == "w1"
        assert registration.address == f"127.0.0.1:{host.server.port}"
        assert registration.epoch == host.worker.epoch
        assert registration.epoch < 2**53
        assert registration.card.model == "tiny"
        assert len(log.heartbeats[0].loads) == 1
        for number in range(5):
            await say(host, f"r{number}", range(3, 103 + 16 * number))
        await until(lambda: len(log.present) == cached(host))
        assert log.present == set(block_hashes(range(3, 167), 16))
        assert log.snapshots == 0
        await host.engine.clear_cache()
        await until(lambda: not log.present)


async def test_evictions_are_told_too(folder: Path) -> None:
    log = router_log()
    async with (
        router(log) as server,
        hosted(folder, routers=[f"127.0.0.1:{server.port}"], total_blocks=8, block_size=4) as host,
    ):
        for number in range(6):
            await say(host, f"r{number}", range(3 + 50 * number, 21 + 50 * number))
        await until(lambda: log.batches)
        await until(lambda: len(log.present) == cached(host))
        assert log.present <= {hash_ for n in range(6) for hash_ in block_hashes(range(3 + 50 * n, 21 + 50 * n), 4)}
        assert len(log.present) <= 8


async def test_a_router_that_missed_something_gets_a_snapshot(folder: Path) -> None:
    log = router_log()
    async with router(log) as server, hosted(folder, routers=[f"127.0.0.1:{server.port}"]) as host:
        await say(host, "a", range(3, 103))
        await until(lambda: len(log.present) == 6)
        truth = set(log.present)
        log.present = {1, 2, 3}
        await log.ask_for_snapshot()
        await until(lambda: log.snapshots == 1)
        assert log.present == truth
        await say(host, "b", range(203, 303))
        await until(lambda: len(log.present) == 12)


async def test_after_a_lost_stream_it_attaches_elsewhere_and_continues(folder: Path) -> None:
    first, second = router_log(), router_log()
    async with router(second) as server2, router(first) as server1:
        routers = [f"127.0.0.1:{server.port}" for server in (server1, server2)]
        host_context = hosted(folder, routers=routers)
        host = await host_context.__aenter__()
        try:
            await until(lambda: first.registrations or second.registrations)
            used, spare = (first, second) if first.registrations else (second, first)
            used_server = server1 if used is first else server2
            await say(host, "a", range(3, 103))
            await until(lambda: len(used.present) == 6)
            spare.holds = {0: used.sequence}  # the replicas share a store: this one knows what the other learned
            spare.sequence, spare.present = used.sequence, set(used.present)
            await used_server.stop(0)
            await until(lambda: spare.registrations)
            await say(host, "b", range(203, 303))
            await until(lambda: len(spare.present) == 12)
            assert spare.snapshots == 0
            assert spare.registrations[0].epoch == used.registrations[0].epoch
        finally:
            await host_context.__aexit__(None, None, None)


async def test_a_router_too_far_behind_gets_a_snapshot_on_attach(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_log, "BACKLOG_BATCHES", 2)
    log = router_log()
    async with router(log, free_port()) as server:
        port = server.port
        async with hosted(folder, routers=[f"127.0.0.1:{port}"]) as host:
            for number in range(5):
                await say(host, f"r{number}", range(3 + 100 * number, 40 + 100 * number))
                await until(lambda: len(log.present) == cached(host))
            assert log.sequence >= 3
            truth = set(log.present)
            await server.stop(0)
            fresh = router_log()
            async with router(fresh, port):
                await until(lambda: fresh.snapshots == 1)
                assert fresh.present == truth
                assert fresh.sequence == log.sequence


async def test_a_restarted_worker_has_a_higher_epoch_and_an_empty_cache(folder: Path) -> None:
    log = router_log()

    def has_registered(times: int) -> bool:
        return len(log.registrations) == times

    async with router(log) as server:
        for number in (1, 2):
            async with hosted(folder, routers=[f"127.0.0.1:{server.port}"], worker_id="same"):
                await until(partial(has_registered, number))
    assert log.registrations[1].epoch > log.registrations[0].epoch


async def test_leaving_comes_before_everything_else_of_a_shutdown(folder: Path) -> None:
    log = router_log()
    async with router(log) as server, hosted(folder, routers=[f"127.0.0.1:{server.port}"], speedup=1.0) as host:
        await until(lambda: log.heartbeats)
        async with stub_of(host) as stub:
            running = aiter(stub.Generate(generation("running", max_tokens=60, ignore_eos=True)))
            await anext(running)
            stopping = asyncio.create_task(host.shut_down())
            await until(lambda: log.leaves)
            assert host.worker.live_requests == 1
            assert [delta async for delta in running][-1].extra.usage.completion_tokens == 60
            async with asyncio.timeout(10):
                await stopping
        assert log.leaves == ["shutdown"]
        assert log.lost == 1


async def test_a_router_whose_name_goes_while_it_takes_the_worker_in_is_not_the_end(folder: Path) -> None:
    class Stuck(RouterLog):
        """Does not answer the first registration."""

        async def Attach(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
            if not self.registrations:
                self.registrations.append((await context.read()).registration)
                await asyncio.Event().wait()
            await super().Attach(request_iterator, context)

    log = Stuck()  # type: ignore[abstract]
    async with router(log) as server, hosted(folder, routers=[f"127.0.0.1:{server.port}"]) as host:
        await until(lambda: log.registrations)
        assert host._routers is not None
        await host._routers._remove(f"127.0.0.1:{server.port}")  # as when it leaves the name service
        await host._routers._resolve_all()
        await until(lambda: len(log.registrations) > 1 and log.heartbeats)


async def test_no_router_is_no_reason_not_to_serve(folder: Path) -> None:
    async with router(router_log(), free_port()) as server:
        taken = server.port
    async with hosted(folder, routers=[f"127.0.0.1:{taken}"]) as host:
        await say(host, "a", range(3, 50))
        log = router_log()
        async with router(log, taken):
            await until(lambda: len(log.present) == cached(host))
