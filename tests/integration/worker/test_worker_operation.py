"""Operating a worker over real gRPC: control, embeddings, health by generations, and what its router hears of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import Stop
from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from services.worker import server as worker_server
from services.worker.contract.engine import EngineConfig
from services.worker.engines.mock import MockEngine
from services.worker.server import WorkerServer
from services.worker.serving.canary import Canary
from services.worker.settings import WorkerSettings
from sluice.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2
from tests.support.servers.router_cluster import routers
from tests.support.servers.workers import Caller, generation, hosted, stub_of
from tests.support.waiting import until

Action = worker_pb2.ControlRequest


class Listening(router_pb2_grpc.RouterServicer):
    """A router that remembers who is registered."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.cards: list[common_pb2.ModelCard] = []
        self.present: set[str] = set()
        self.snapshots = 0
        self._streams: dict[str, Any] = {}

    async def Attach(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        first = (await context.read()).registration
        name = first.worker_id
        self._streams[name] = context
        self.present.add(name)
        self.cards.append(first.card)
        self.heard.append(f"register {name}")
        await context.write(
            router_pb2.AttachResponse(attached=router_pb2.Attached(lease_ms=3000, heartbeat_interval_ms=50))
        )
        try:
            while isinstance(message := await context.read(), router_pb2.AttachRequest):
                if self._streams.get(name) is not context:
                    return
                if message.HasField("leave"):
                    self.present.discard(name)
                    self.heard.append(f"leave {message.leave.reason}")
                if message.HasField("snapshot") and message.snapshot.last:
                    self.snapshots += 1
        finally:
            if self._streams.get(name) is context:
                self.present.discard(name)
                self.heard.append(f"gone {name}")


@pytest.fixture
async def listening() -> AsyncIterator[tuple[Listening, str]]:
    log = Listening()  # type: ignore[abstract]  # has only the call that workers make
    server = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0"), router_pb2.DESCRIPTOR)
    router_pb2_grpc.add_RouterServicer_to_server(log, server.server)
    await server.start()
    await server.set_serving(True)
    yield log, f"127.0.0.1:{server.port}"
    await server.stop(0)


async def act(host: WorkerServer, action: int, **arguments: str) -> dict[str, str]:
    async with stub_of(host) as stub:
        answer = await stub.Control(worker_pb2.ControlRequest(action=action, arguments=arguments))  # type: ignore[arg-type]
    return dict(answer.results)


async def refusal(call: Any) -> SluiceError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value, "worker")


async def serving(host: WorkerServer) -> bool:
    channel = open_channel(f"127.0.0.1:{host.server.port}")
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    finally:
        await channel.close()
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def phase(host: WorkerServer) -> str:
    async with stub_of(host) as stub:
        return (await stub.GetInfo(worker_pb2.GetInfoRequest())).phase


async def test_a_loaded_adapter_reaches_the_router_while_the_worker_stays_in_its_answers(
    folder: Path, listening: tuple[Listening, str]
) -> None:
    router, address = listening
    async with hosted(folder, routers=[address], worker_id="w") as host:
        await until(lambda: router.present)
        await act(host, Action.ACTION_LOAD_LORA, name="polite")
        await until(lambda: len(router.cards) == 2)
        await until(lambda: host.registration is not None and host.registration.attached.is_set())
        assert list(router.cards[-1].adapters) == ["polite"]
        assert router.present == {"w"}
        async with stub_of(host) as stub:
            async for _ in stub.Generate(generation("r", model="polite", max_tokens=2)):
                pass
        await act(host, Action.ACTION_UNLOAD_LORA, name="polite")
        await until(lambda: len(router.cards) == 3)
        assert list(router.cards[-1].adapters) == []
        assert router.present == {"w"}
        assert router.heard == ["register w"] * 3
        snapshots = router.snapshots
        await act(host, Action.ACTION_RESYNC)
        await until(lambda: router.snapshots > snapshots)
    assert router.heard[3] == "leave shutdown"


async def test_worker_is_healthy_after_its_first_registration_and_stays_so(folder: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    log = Listening()  # type: ignore[abstract]  # has only the call that workers make
    server = GrpcServer(GrpcServiceSettings(listen=address), router_pb2.DESCRIPTOR)
    router_pb2_grpc.add_RouterServicer_to_server(log, server.server)
    async with hosted(folder, routers=[address], worker_id="w") as host:
        await act(host, Action.ACTION_SLEEP)
        await act(host, Action.ACTION_WAKE)
        await asyncio.sleep(0.2)
        assert not await serving(host), "no router has it"
        assert host.health()["phase"] == "registering with a router"
        await server.start()
        await server.set_serving(True)
        await until(lambda: log.present)
        async with asyncio.timeout(10):
            while not await serving(host):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (host.health()["status"], host.health()["phase"]) == ("ok", "")
        await server.stop(0)
        assert host.registration is not None
        attached = host.registration.attached
        await until(lambda: not attached.is_set())
        await act(host, Action.ACTION_SLEEP)
        assert not await serving(host)
        await act(host, Action.ACTION_WAKE)
        assert await serving(host), "an outage of the routers takes no worker down"


async def test_a_sleeping_worker_is_out_of_discovery_and_comes_back(
    folder: Path, listening: tuple[Listening, str]
) -> None:
    router, address = listening
    async with hosted(folder, routers=[address], worker_id="w") as host:
        await until(lambda: router.present)
        await act(host, Action.ACTION_SLEEP)
        await until(lambda: not router.present)
        assert await phase(host) == "asleep"
        assert not await serving(host)
        async with stub_of(host) as stub:
            error = await refusal(stub.Generate(generation("r")).read())
        assert (error.kind, error.code) == (ErrorKind.UNAVAILABLE, "asleep")
        await act(host, Action.ACTION_WAKE)
        await until(lambda: router.present)
        assert await serving(host)
        assert await phase(host) == ""
        assert router.heard[:2] == ["register w", "leave asleep"]


async def test_a_hang_is_noticed_and_forgiven(
    folder: Path, listening: tuple[Listening, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, address = listening
    monkeypatch.setattr(worker_server, "Canary", partial(Canary, timeout_s=1.5))
    async with hosted(folder, routers=[address], worker_id="w", canary_s=0.1) as host, stub_of(host) as stub:
        await until(lambda: router.present)
        assert await act(host, Action.ACTION_INJECT_FAULT, fault="hang") == {"fault": "hang"}
        caller = Caller(stub)
        await caller.send({1: generation("stuck")})
        await caller.ended(1)
        assert caller.terminals[1].error.code == "engine_unhealthy"
        assert caller.terminals[1].error.retryable
        await until(lambda: not router.present)
        assert await phase(host) == "unhealthy"
        assert not await serving(host)
        await caller.send({2: generation("refused")})
        await caller.ended(2)
        assert caller.terminals[2].error.code == "engine_unhealthy"
        await act(host, Action.ACTION_INJECT_FAULT, fault="none")
        await until(lambda: router.present)
        await caller.send({3: generation("served", max_tokens=3, ignore_eos=True)})
        await caller.ended(3)
        assert len(caller.token_ids[3]) == 3
        await caller.close()


async def test_the_later_of_two_workers_with_one_id_takes_over_when_the_first_ends(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with routers() as (router,):
        where = [f"127.0.0.1:{router.port}"]
        async with hosted(folder, routers=where, worker_id="w") as older:
            assert older.registration is not None
            await older.registration.attached.wait()
            async with hosted(folder, routers=where, worker_id="w") as newer:
                registration = newer.registration
                assert registration is not None
                await until(lambda: registration.trouble == "worker_id_taken")
                assert "another process holds worker id w" in caplog.text
                assert older.registration.attached.is_set()
                await older.registration.leave("test")
                await registration.attached.wait()
                assert registration.trouble == ""


async def test_a_starting_worker_answers_probes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading = asyncio.Event()
    start = MockEngine.start

    async def slow(self: MockEngine, worker_id: str) -> EngineConfig:
        self.on_phase("loading weights", 0.25)
        await loading.wait()
        return await start(self, worker_id)

    monkeypatch.setattr(MockEngine, "start", slow)
    settings = WorkerSettings(listen="127.0.0.1:0", model=f"tiny={folder}", grace_s=0.0)
    host = WorkerServer(settings, Stop())
    starting = asyncio.create_task(host.start())
    try:
        await until(lambda: host.server.port and host.worker.phases.name == "loading weights")
        assert not await serving(host)
        async with stub_of(host) as stub:
            info = await stub.GetInfo(worker_pb2.GetInfoRequest())
            assert (info.phase, info.phase_share) == ("loading weights", 0.25)
            assert info.epoch == host.worker.epoch
            assert not info.HasField("card")
            error = await refusal(stub.Generate(generation("early")).read())
            assert error.code == "worker_starting"
            loading.set()
            await starting
            assert (await stub.GetInfo(worker_pb2.GetInfoRequest())).card.model == "tiny"
        assert await serving(host)
    finally:
        await host.shut_down()


async def test_five_hundred_random_cancels_leave_nothing_behind(folder: Path) -> None:
    chance = random.Random(7)
    async with hosted(folder, speedup=50.0, total_blocks=400, max_sequences=32) as host, stub_of(host) as stub:
        caller = Caller(stub)
        for first in range(0, 500, 50):
            slots = range(first, first + 50)
            await caller.send(
                {
                    slot: generation(f"r-{slot}", [9 + slot % 7] * chance.randint(1, 200), ignore_eos=True)
                    for slot in slots
                }
            )
            for slot in chance.sample(list(slots), 50):
                await asyncio.sleep(chance.choice((0, 0, 0.001, 0.003)))
                await caller.send(cancels=[slot])
        await caller.ended(*range(500))
        assert host.worker.live_requests == 0
        load = host.engine.load()[0]
        assert (load.running_requests, load.waiting_requests, load.used_blocks, load.prefill_tokens) == (0, 0, 0, 0)
        assert {terminal.finish_reason for terminal in caller.terminals.values()} <= {
            common_pb2.FINISH_REASON_CANCELLED,
            common_pb2.FINISH_REASON_LENGTH,
        }
        await caller.send({600: generation("after", max_tokens=3, ignore_eos=True)})
        await caller.ended(600)
        await caller.close()


async def test_a_stop_under_load_finishes_what_runs_and_sends_the_rest_elsewhere(folder: Path) -> None:
    async with hosted(folder, speedup=1.0, grace_s=3.0, drain_s=120.0) as host, stub_of(host) as stub:
        caller, long = Caller(stub), 99
        lengths = {slot: 20 + slot for slot in range(64)}
        await caller.send(
            {slot: generation(f"r{slot}", max_tokens=tokens, ignore_eos=True) for slot, tokens in lengths.items()}
        )
        await caller.send({long: generation("long", ignore_eos=True)})  # keeps the drain open for as long as it takes
        await caller.began(0, long)
        stopping = asyncio.create_task(host.shut_down())
        await until(lambda: host.worker.draining)
        assert not await serving(host)
        await caller.send({100: generation("late", max_tokens=3, ignore_eos=True)})  # routed before the news spread
        await caller.ended(100)
        assert len(caller.token_ids[100]) == 3
        slot = 200
        while slot not in caller.terminals or not caller.terminals[slot].HasField("error"):
            slot += 1
            await caller.send({slot: generation(f"new-{slot}", max_tokens=1, ignore_eos=True)})
            await caller.ended(slot)
        assert ErrorKind(caller.terminals[slot].error.kind) is ErrorKind.ENGINE_SHUTDOWN
        assert caller.terminals[slot].error.retryable
        await caller.ended(*lengths)
        await caller.send(cancels=[long])
        await caller.ended(long)
        await stopping
        for slot, tokens in lengths.items():
            assert caller.terminals[slot].finish_reason == common_pb2.FINISH_REASON_LENGTH
            assert len(caller.token_ids[slot]) == tokens
        await caller.close()


async def test_a_session_ends_in_order_when_the_worker_does(folder: Path) -> None:
    async with hosted(folder) as host, stub_of(host) as stub:
        call = stub.Session()
        await call.write(
            worker_pb2.WorkerSessionRequest(starts=[worker_pb2.SessionStart(slot=1, request=generation("r"))])
        )
        await until(lambda: host.service.sessions)
        await host.shut_down()
        while await call.read() is not grpc.aio.EOF:
            pass
        assert await call.code() is grpc.StatusCode.OK
