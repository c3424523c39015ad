"""Balancing over real replicas: calls spread, a dead replica gets none, a returned one gets some again."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from services.common.base.errors import ErrorKind, SluiceError, invalid, unavailable
from services.common.net.ports import free_port
from services.common.rpc import replicas
from services.common.rpc.errors import abort
from services.common.rpc.replicas import ReplicaSet
from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from sluice.v1 import worker_pb2, worker_pb2_grpc
from tests.support.waiting import until

DEADLINE_S = 20


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "WATCH_RETRY_S", 0.05)
    monkeypatch.setattr(replicas, "RESOLVE_EVERY_S", 0.05)


class Worker(worker_pb2_grpc.WorkerServicer):
    """Says its name, or why not."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refusal: SluiceError | None = None
        self.stopping = False
        self.calls = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def GetInfo(self, request: Any, context: Any) -> worker_pb2.GetInfoResponse:
        self.calls += 1
        await self.gate.wait()
        if self.stopping:  # what callers see of a call that came in while the server was closing
            await context.abort(grpc.StatusCode.CANCELLED)
        if self.refusal is not None:
            await abort(context, self.refusal)
        return worker_pb2.GetInfoResponse(worker_id=self.name)


class Host:
    """A replica that can be stopped and started again on its port."""

    def __init__(self, name: str) -> None:
        self.worker = Worker(name)  # type: ignore[abstract]
        self.port = free_port()
        self.server: GrpcServer | None = None

    async def start(self, serving: bool = True) -> Host:
        self.server = GrpcServer(GrpcServiceSettings(listen=f"127.0.0.1:{self.port}"), worker_pb2.DESCRIPTOR)
        worker_pb2_grpc.add_WorkerServicer_to_server(self.worker, self.server.server)
        await self.server.start()
        self.port = self.server.port
        await self.server.set_serving(serving)
        return self

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)
        self.server = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


Set = ReplicaSet[worker_pb2_grpc.WorkerStub]


@asynccontextmanager
async def suite(count: int, events: list[str] | None = None) -> AsyncIterator[tuple[list[Host], Set]]:
    hosts = [await Host(f"w{index}").start() for index in range(count)]
    told: list[str] = [] if events is None else events
    addresses = [host.address for host in hosts]
    chosen: Set = ReplicaSet("worker", addresses, worker_pb2_grpc.WorkerStub, on_event=told.append)
    await chosen.start()
    try:
        await until(lambda: len(chosen.serving) == count)
        yield hosts, chosen
    finally:
        await chosen.close()
        for host in hosts:
            await host.stop()


async def ask(chosen: Set, attempts: int = 2, timeout_s: float = DEADLINE_S, prefer: Any = None) -> str:
    answer: worker_pb2.GetInfoResponse = await chosen.call(
        lambda stub: cast(Any, stub).GetInfo, worker_pb2.GetInfoRequest(), timeout_s, attempts, prefer=prefer
    )
    return answer.worker_id


async def test_calls_spread_over_both() -> None:
    async with suite(2) as (_, chosen):
        answers = Counter([await ask(chosen) for _ in range(60)])
        assert set(answers) == {"w0", "w1"}
        assert all(replica.outstanding == 0 for replica in chosen.serving)


async def test_a_busy_replica_gets_fewer() -> None:
    async with suite(2) as (hosts, chosen):
        hosts[0].worker.gate.clear()
        stuck = [asyncio.create_task(ask(chosen)) for _ in range(40)]
        await until(lambda: hosts[1].worker.calls >= 20)
        await until(lambda: sum(task.done() for task in stuck) >= 20)
        await until(lambda: sum(host.worker.calls for host in hosts) == 40)
        before = hosts[0].worker.calls
        assert [await ask(chosen) for _ in range(20)] == ["w1"] * 20
        assert hosts[0].worker.calls == before
        hosts[0].worker.gate.set()
        await asyncio.gather(*stuck)


async def test_call_with_a_preferred_replica_reaches_it_while_it_serves() -> None:
    async with suite(2) as (hosts, chosen):
        first = next(replica.stub for replica in chosen.serving if replica.address == hosts[0].address)
        assert [await ask(chosen, prefer=first) for _ in range(20)] == ["w0"] * 20
        await hosts[0].stop()
        await until(lambda: len(chosen.serving) == 1)
        assert [await ask(chosen, prefer=first) for _ in range(5)] == ["w1"] * 5


async def test_dead_replica_costs_no_call_and_a_returned_one_serves_again() -> None:
    async with suite(2) as (hosts, chosen):
        await hosts[0].stop()
        assert [await ask(chosen) for _ in range(40)] == ["w1"] * 40  # also before the watch has noticed
        await until(lambda: len(chosen.serving) == 1)
        await hosts[0].start()
        await until(lambda: len(chosen.serving) == 2)
        assert {await ask(chosen) for _ in range(60)} == {"w0", "w1"}


async def test_draining_replica_gets_no_new_calls() -> None:
    async with suite(2) as (hosts, chosen):
        assert hosts[0].server is not None
        await hosts[0].server.set_serving(False)
        await until(lambda: len(chosen.serving) == 1)
        assert {await ask(chosen) for _ in range(20)} == {"w1"}


async def test_nobody_ready_is_a_typed_refusal() -> None:
    async with suite(1) as (hosts, chosen):
        await hosts[0].stop()
        await until(lambda: not chosen.serving)
        assert await chosen.wait_ready(0.1) is False
        with pytest.raises(SluiceError, match="No worker replica is ready") as refused:
            chosen.pick()
        assert refused.value.kind is ErrorKind.UNAVAILABLE
        assert refused.value.retry_after_ms > 0
        with pytest.raises(SluiceError, match="No worker replica is ready"):
            await ask(chosen)


async def test_refusal_that_may_go_elsewhere_goes_elsewhere_and_others_do_not() -> None:
    async with suite(2) as (hosts, chosen):
        hosts[0].worker.refusal = unavailable("Draining.")
        assert {await ask(chosen) for _ in range(20)} == {"w1"}
        hosts[1].worker.refusal = invalid("Never.", param="x")
        hosts[0].worker.refusal = None
        answers = set()
        for _ in range(40):
            try:
                answers.add(await ask(chosen))
            except SluiceError as error:
                answers.add(f"{error.kind.name} {error.param}")
        assert answers == {"w0", "INVALID_ARGUMENT x"}


async def test_both_refusing_gives_the_last_reason() -> None:
    async with suite(2) as (hosts, chosen):
        for host in hosts:
            host.worker.refusal = unavailable("Draining.", code="draining")
        with pytest.raises(SluiceError, match=r"Draining\.") as refused:
            await ask(chosen)
        assert refused.value.code == "draining"
        assert hosts[0].worker.calls + hosts[1].worker.calls == 2


async def test_slow_replica_is_a_deadline_not_a_hang() -> None:
    async with suite(1) as (hosts, chosen):
        hosts[0].worker.gate.clear()
        with pytest.raises(SluiceError) as refused:
            await ask(chosen, timeout_s=0.2)
        assert refused.value.kind is ErrorKind.DEADLINE_EXCEEDED
        hosts[0].worker.gate.set()


async def test_exclude_and_changes() -> None:
    changes = 0

    def count() -> None:
        nonlocal changes
        changes += 1

    host = await Host("w").start(serving=False)
    chosen: Set = ReplicaSet("worker", [host.address], worker_pb2_grpc.WorkerStub, on_change=count)
    try:
        await chosen.start()
        assert changes == 0
        assert host.server is not None
        await host.server.set_serving(True)
        assert await chosen.wait_ready(DEADLINE_S)
        assert changes == 1
        assert chosen.pick().address == host.address
        with pytest.raises(SluiceError):
            chosen.pick(exclude=frozenset({host.address}))
    finally:
        await chosen.close()
        await host.stop()


async def test_a_replica_that_left_is_known_until_its_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [await Host("w0").start()]

    async def resolve(target: str) -> list[tuple[str, str]]:
        return [(host.address, "worker") for host in known]

    monkeypatch.setattr(replicas, "_resolve", resolve)
    monkeypatch.setattr(replicas, "RESOLVE_EVERY_S", 0.02)
    chosen: Set = ReplicaSet("worker", ["worker:1"], worker_pb2_grpc.WorkerStub)
    await chosen.start()
    leaver, stays = known[0], await Host("w1").start()
    try:
        assert await chosen.wait_ready(DEADLINE_S)
        leaver.worker.gate.clear()
        late = asyncio.create_task(ask(chosen))
        await until(lambda: leaver.worker.calls == 1)
        known[:] = [stays]
        assert leaver.server is not None
        await leaver.server.set_serving(False)
        await until(lambda: [replica.address for replica in chosen.serving] == [stays.address])
        await asyncio.sleep(0.2)
        leaver.worker.gate.set()
        assert await late == "w0"
        await until(lambda: leaver.address not in chosen._replicas)
    finally:
        await chosen.close()
        await leaver.stop()
        await stays.stop()


async def test_a_channel_that_is_closed_under_a_call_does_not_cancel_its_caller() -> None:
    async with suite(1) as (hosts, chosen):
        hosts[0].worker.gate.clear()
        asking = asyncio.create_task(ask(chosen, attempts=1))
        await until(lambda: hosts[0].worker.calls == 1)
        await chosen.serving[0].channel.close()
        with pytest.raises(SluiceError, match="removed before it responded") as lost:
            await asking
        assert lost.value.kind is ErrorKind.UNAVAILABLE
        hosts[0].worker.gate.set()


async def test_name_that_changes_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[Host] = [await Host("w0").start()]

    async def resolve(target: str) -> list[tuple[str, str]]:
        assert target == "worker:1"
        return [(host.address, "worker") for host in known]

    monkeypatch.setattr(replicas, "_resolve", resolve)
    chosen: Set = ReplicaSet("worker", ["worker:1"], worker_pb2_grpc.WorkerStub)
    await chosen.start()
    first, second = known[0], await Host("w1").start()
    try:
        await until(lambda: len(chosen.serving) == 1)
        known.append(second)
        await until(lambda: len(chosen.serving) == 2)
        known.remove(first)
        await first.stop()
        await until(lambda: [replica.address for replica in chosen.serving] == [second.address])
        known.clear()  # a name service that is away: what is known stays
        await asyncio.sleep(0.2)
        assert await ask(chosen) == "w1"
    finally:
        await chosen.close()
        await first.stop()
        await second.stop()


async def test_target_without_a_port_is_refused() -> None:
    chosen: Set = ReplicaSet("worker", ["worker"], worker_pb2_grpc.WorkerStub)
    with pytest.raises(SluiceError, match="host:port"):
        await chosen.start()
    await chosen.close()


async def test_closing_leaves_no_task(caplog: pytest.LogCaptureFixture) -> None:
    before = asyncio.all_tasks()
    with caplog.at_level(logging.ERROR):
        async with suite(2) as (_, chosen):
            await ask(chosen)
        await until(lambda: asyncio.all_tasks() <= before)
    # gRPC has one poller for all event loops of a process, and may hold an event of an earlier test's closed loop.
    logged = [record.getMessage() for record in caplog.records]
    assert [text for text in logged if "PollerCompletionQueue" not in text] == []


async def test_a_call_that_takes_unusually_long_is_made_elsewhere_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "HEDGE_GUESS_S", 0.05)
    events: list[str] = []
    async with suite(2, events) as (hosts, chosen):
        hosts[0].worker.gate.clear()
        answers = [
            (
                await chosen.call(
                    lambda stub: cast(Any, stub).GetInfo, worker_pb2.GetInfoRequest(), DEADLINE_S, hedge="info"
                )
            ).worker_id
            for _ in range(12)
        ]
        assert set(answers) == {"w1"}
        assert "hedge_won" in events
        assert all(replica.outstanding == 0 for replica in chosen.serving)


async def test_hedges_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "HEDGE_GUESS_S", 0.02)
    monkeypatch.setattr(replicas, "HEDGE_BURST", 3.0)
    async with suite(2) as (hosts, chosen):
        for host in hosts:
            host.worker.gate.clear()
        calls = [
            asyncio.create_task(
                chosen.call(lambda stub: cast(Any, stub).GetInfo, worker_pb2.GetInfoRequest(), DEADLINE_S, hedge="info")
            )
            for _ in range(20)
        ]
        await until(lambda: sum(host.worker.calls for host in hosts) >= 23)
        await asyncio.sleep(0.3)
        assert sum(host.worker.calls for host in hosts) == 23, "20 calls and 3 more"
        for host in hosts:
            host.worker.gate.set()
        assert len(await asyncio.gather(*calls)) == 20


async def test_a_replica_that_never_answers_is_left_alone_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "PATIENCE_S", 0.05)
    events: list[str] = []
    async with suite(1, events) as (hosts, chosen):
        hosts[0].worker.gate.clear()
        codes = []
        for _ in range(7):
            with pytest.raises(SluiceError) as refused:
                await ask(chosen, timeout_s=0.1)
            codes.append(refused.value.code)
        assert codes == ["stage_timeout"] * 5 + ["circuit_open"] * 2
        assert events.count("circuit_opened") == 1
        hosts[0].worker.gate.set()
        await until(lambda: chosen.serving[0].breaker.passable)
        assert await ask(chosen) == "w0"
        assert chosen.serving[0].breaker.closed


async def test_timeouts_of_calls_that_wait_for_others_open_no_circuit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "PATIENCE_S", 0.05)
    async with suite(1) as (hosts, chosen):
        hosts[0].worker.gate.clear()
        for _ in range(7):
            with pytest.raises(SluiceError) as refused:
                await chosen.call(
                    lambda stub: cast(Any, stub).GetInfo, worker_pb2.GetInfoRequest(), 0.1, attempts=1, waits=True
                )
            assert refused.value.code == "stage_timeout"
        hosts[0].worker.gate.set()
        assert await ask(chosen) == "w0"


async def test_typed_refusals_open_no_circuit() -> None:
    async with suite(1) as (hosts, chosen):
        hosts[0].worker.refusal = unavailable("Not now.", code="no_workers")
        for _ in range(20):
            with pytest.raises(SluiceError) as refused:
                await ask(chosen)
            assert refused.value.code == "no_workers"


async def test_a_call_that_a_stopping_replica_lets_go_of_is_made_on_the_other() -> None:
    async with suite(2) as (hosts, chosen):
        hosts[0].worker.stopping = True
        assert {await ask(chosen) for _ in range(20)} == {"w1"}
        assert hosts[0].worker.calls > 0


async def test_a_call_that_the_server_lets_go_of_when_its_time_is_up_was_late() -> None:
    async def let_go(request: Any, timeout: float, metadata: Any) -> worker_pb2.GetInfoResponse:
        """What a busy process sees: the server's word comes before its own clock rings."""
        await asyncio.sleep(timeout + 0.01)
        raise grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata())

    async with suite(1) as (_, chosen):
        with pytest.raises(SluiceError) as refused:
            await chosen.call(lambda stub: let_go, worker_pb2.GetInfoRequest(), 0.05)
        assert (refused.value.kind, refused.value.code) == (ErrorKind.DEADLINE_EXCEEDED, "stage_timeout")


async def test_calls_that_are_lost_are_repeated_within_a_budget_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RETRY_BURST", 3.0)
    monkeypatch.setattr(replicas, "RETRIES_PER_CALL", 0.0)
    made = 0

    async def lost(request: Any, timeout: float, metadata: Any) -> worker_pb2.GetInfoResponse:
        """What a caller sees of a call whose replica died: how much of it was done is unknown."""
        nonlocal made
        made += 1
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

    async with suite(2) as (_, chosen):
        for replica in chosen.serving:
            replica.breaker.failed = lambda: False  # type: ignore[method-assign]
        for _ in range(10):
            with pytest.raises(SluiceError) as refused:
                await chosen.call(lambda stub: lost, worker_pb2.GetInfoRequest(), DEADLINE_S)
            assert refused.value.kind is ErrorKind.UNAVAILABLE
        assert made == 10 + 3
