"""B3: a worker's id belongs to one process, and an attached worker speaks of itself only."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u64
from services.common.base.tasks import Stop
from services.common.observability.instruments import read
from services.common.rpc.errors import from_rpc_error
from services.router.metrics import REFUSED
from services.worker.metrics import ID_TAKEN
from services.worker.server import WorkerServer
from services.worker.settings import WorkerSettings
from sluice.v1 import (
    common_pb2,
    router_pb2,
    router_pb2_grpc,
    worker_pb2,
)
from tests.support.clients.callers import (
    A_DAY_US,
    Calls,
    addresses,
    attach_soon,
    is_attached,
    now_us,
    ready_routers,
    refusal,
)
from tests.support.data.authority import Authority
from tests.support.data.tokens import accept
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.router_cluster import MODEL, FakeWorker, RouterProcess, routers
from tests.support.servers.workers import generation, hosted, stub_of
from tests.support.waiting import until


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Settings of routers that keep their state in memory, or in a Redis under a prefix of their own."""
    if request.param == "memory":
        return {}
    return {"redis_url": request.getfixturevalue("shared_redis").url, "redis_prefix": tmp_path.name}


async def test_registration_under_anothers_worker_id_ends_no_worker(folder: Path, store: dict[str, Any]) -> None:
    async with ready_routers(**store) as (router,):
        stop = Stop()
        host = WorkerServer(
            WorkerSettings(
                listen="127.0.0.1:0",
                model=f"tiny={folder}",
                speedup=1e6,
                routers=[f"127.0.0.1:{router.port}"],
                worker_id="w1",
                grace_s=0.0,
                canary_s=0.0,
                processing="none",
            ),
            stop,
        )
        await host.start()
        try:
            assert host.registration is not None
            await host.registration.attached.wait()
            honest = await addresses(router)
            for epoch in (host.worker.epoch + 1, now_us() + A_DAY_US // 2):
                error = await refusal(router, FakeWorker("w1", epoch=epoch, model="tiny"))
                assert (error.kind, error.code) == (ErrorKind.FAILED_PRECONDITION, "worker_id_taken")
                assert error.retryable
                assert 0 < error.retry_after_ms <= router.settings.lease_ms
            error = await refusal(router, FakeWorker("w1", epoch=2**64 - 1, model="tiny"))
            assert (error.kind, error.code) == (ErrorKind.INVALID_ARGUMENT, "epoch_out_of_range")
            assert host.registration.attached.is_set()
            assert await addresses(router) == honest
            assert not stop.is_set()
        finally:
            await host.shut_down()


@pytest.mark.parametrize("epoch", [0, 2**64 - 1, 2**63])
async def test_epoch_that_no_clock_can_have_is_refused(epoch: int) -> None:
    async with ready_routers() as (router,):
        error = await refusal(router, FakeWorker("w1", epoch=epoch))
        assert (error.kind, error.param) == (ErrorKind.INVALID_ARGUMENT, "registration.epoch")
        assert (await refusal(router, FakeWorker("w1", epoch=now_us() + A_DAY_US + 60_000_000))).code == error.code
        worker = FakeWorker("w1", epoch=now_us() + A_DAY_US - 60_000_000)
        await worker.attach(router)
        await worker.detach()


async def test_worker_id_is_taken_for_every_model(store: dict[str, Any]) -> None:
    """A gateway knows workers by their ids: one of another model would take the requests of this one."""
    async with ready_routers(**store) as (router,):
        honest = FakeWorker("w1", epoch=now_us())
        await honest.attach(router)
        error = await refusal(router, FakeWorker("w1", epoch=now_us(), model="another"))
        assert error.code == "worker_id_taken"
        assert await addresses(router) == {"w1": honest.registration.address}
        await honest.detach()


async def test_same_process_moves_to_another_replica_while_its_old_stream_is_open(
    shared_redis: RedisServer, tmp_path: Path
) -> None:
    async with ready_routers(2, redis_url=shared_redis.url, redis_prefix=tmp_path.name) as (one, two):
        worker = FakeWorker("w1", epoch=now_us())
        await worker.attach(one)
        old = worker.call
        await worker.store(range(8))
        started = time.monotonic()
        await worker.attach(two)
        assert worker.attached is not None
        assert worker.attached.sequences == {0: 1}, "what the process had cached is known at the other replica"
        assert time.monotonic() - started < one.settings.lease_ms / 1000
        stranger = FakeWorker("w1", epoch=now_us())
        assert (await refusal(one, stranger)).code == "worker_id_taken"
        assert (await refusal(two, stranger)).code == "worker_id_taken"
        old.cancel()
        await worker.detach()


async def test_restarted_worker_whose_old_stream_broke_registers_at_once(store: dict[str, Any]) -> None:
    async with ready_routers(lease_ms=60_000, **store) as (router,):
        before = FakeWorker("w1", epoch=now_us())
        await before.attach(router)
        await before.detach()
        after = FakeWorker("w1", epoch=now_us())
        await attach_soon(router, after)  # the router has to notice first that the stream is gone
        await after.detach()


async def test_worker_id_is_free_after_its_lease(shared_redis: RedisServer, tmp_path: Path) -> None:
    """Also for a process that started earlier: the epochs of two processes are not of one clock."""
    settings = {"redis_url": shared_redis.url, "redis_prefix": tmp_path.name, "lease_ms": 600}
    async with ready_routers(2, **settings) as (one, two):
        first = FakeWorker("w1", epoch=now_us() + 1_000_000)
        first.registration.lease_key = b""
        await first.attach(one)
        await until(lambda: first.ended is not None)  # it is silent, and is cut off
        second = FakeWorker("w1", epoch=now_us())
        second.registration.address = "second.test:50051"
        await attach_soon(two, second)
        second.keep_beating()

        async def is_listed() -> bool:
            listed = [await addresses(replica) for replica in (one, two)]
            return listed == 2 * [{"w1": "second.test:50051"}]

        await until(is_listed)
        await second.detach()


async def test_replica_without_its_store_lets_no_other_process_take_an_id(tmp_path: Path) -> None:
    shared_redis = RedisServer(tmp_path)
    shared_redis.start()
    async with ready_routers(redis_url=shared_redis.url, redis_timeout_s=0.3) as (router,):
        honest = FakeWorker("w1", epoch=now_us())
        await honest.attach(router)
        honest.keep_beating()
        await until(lambda: _knows(router, "w1"))
        shared_redis.stop()
        assert (await refusal(router, FakeWorker("w1", epoch=now_us()))).code == "worker_id_taken"
        assert honest.ended is None
        await honest.detach()


async def _knows(router: RouterProcess, worker_id: str) -> bool:
    return worker_id in await addresses(router)


async def test_worker_without_its_id_serves_on_and_registers_when_it_is_free(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ready_routers() as (router,):
        squatter = FakeWorker("w1", epoch=now_us(), model="tiny")
        await squatter.attach(router)
        squatter.keep_beating()
        async with hosted(folder, routers=[f"127.0.0.1:{router.port}"], worker_id="w1") as host:
            registration = host.registration
            assert registration is not None
            await until(lambda: registration.trouble == "worker_id_taken")
            async with stub_of(host) as stub:
                deltas = [delta async for delta in stub.Generate(generation("r", max_tokens=3, ignore_eos=True))]
                assert deltas[-1].extra.usage.completion_tokens == 3
                info = await stub.GetInfo(worker_pb2.GetInfoRequest())
            assert info.phase == "worker id taken"
            assert host.health()["registration"] == "worker_id_taken"
            assert host.health()["status"] == "waiting"
            tries = read(REFUSED.name)
            await until(lambda: read(REFUSED.name)[("worker_id_taken",)] > tries[("worker_id_taken",)] + 1)
            assert read(ID_TAKEN.name) == {(): 1.0}
            said = [record for record in caplog.records if "holds worker id w1" in record.getMessage()]
            assert [record.levelno for record in said] == [logging.ERROR]
            await squatter.detach()
            await registration.attached.wait()
            assert registration.trouble == ""
            assert host.health()["registration"] == ""
            await until(lambda: host.health()["status"] == "ok")


async def test_refused_registration_is_counted_and_logged_with_both_identities(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = accept(tmp_path / "accepted", "secret-of-one worker", "secret-of-two worker")
    async with ready_routers(tokens_file=tokens) as (router,):
        one, two = (Calls(router.port, f"secret-of-{name}") for name in ("one", "two"))
        worker, thief = FakeWorker("w1", epoch=now_us()), FakeWorker("w1", epoch=now_us())
        call = router_pb2_grpc.RouterStub(one.channel).Attach(metadata=one._metadata)
        await call.write(router_pb2.AttachRequest(registration=worker.registration))
        await call.read()
        for number in (1, 2, 3):
            error = await two.register(thief.registration)
            assert error is not None
            assert error.code == "worker_id_taken"
            assert read(REFUSED.name)[("worker_id_taken",)] == number
        said = [record for record in caplog.records if "another process holds the worker id" in record.getMessage()]
        assert len(said) == 1, "a worker that tries again does not fill the log"
        fields = vars(said[0])
        digests = {line.split()[0][7:19] for line in tokens.read_text().splitlines()}
        assert {fields["refused"], fields["holder"]} == {f"token {digest} at 127.0.0.1" for digest in digests}
        text = caplog.text + str([vars(record) for record in caplog.records])
        keys = (worker.registration.lease_key.hex(), thief.registration.lease_key.hex(), "secret-of-")
        assert not any(secret in text for secret in keys)
        call.cancel()
        for each in (one, two):
            await each.channel.close()


@pytest.mark.parametrize("proof", ["token", "certificate"])
async def test_identity_of_one_worker_registers_that_worker_only(tmp_path: Path, proof: str) -> None:
    settings: dict[str, Any]
    if proof == "token":
        settings = {"tokens_file": accept(tmp_path / "accepted", "own worker/w1", "shared worker")}
        shown: dict[str, dict[str, Any]] = {"own": {"token": "own"}, "shared": {"token": "shared"}}
    else:
        authority = Authority(tmp_path)
        trust = authority.issue("server", "spiffe://sluice/router")
        settings = {"tls_require_client_cert": True, **trust.model_dump(include={"tls_cert", "tls_key", "tls_ca"})}
        shown = {
            "own": {"tls": authority.issue("own", "spiffe://sluice/worker/w1")},
            "shared": {"tls": authority.issue("shared", "spiffe://sluice/worker")},
        }
    async with routers(**settings) as (router,):
        own, shared = (Calls(router.port, **shown[name]) for name in ("own", "shared"))
        error = await own.register(FakeWorker("w2", epoch=now_us()).registration)
        assert error is not None
        assert (error.kind, error.code) == (ErrorKind.PERMISSION_DENIED, "caller_not_allowed")
        if proof == "token":  # the file says which ids are whose; an authority's certificates are nowhere listed
            error = await shared.register(FakeWorker("w1", epoch=now_us()).registration)
            assert error is not None
            assert (error.kind, error.code) == (ErrorKind.PERMISSION_DENIED, "caller_not_allowed")
        else:  # it may squat on a free id, and loses it to the caller whose id it is
            squatter = router_pb2_grpc.RouterStub(shared.channel).Attach()
            late = FakeWorker("w1", epoch=now_us() + A_DAY_US // 2)
            await squatter.write(router_pb2.AttachRequest(registration=late.registration))
            assert await is_attached(squatter)
        first, restarted = FakeWorker("w1", epoch=now_us()), FakeWorker("w1", epoch=now_us() + 1)
        calls = []
        for worker in (first, restarted):  # a restart with a new lease key does not wait for the old lease
            call = router_pb2_grpc.RouterStub(own.channel).Attach(metadata=own._metadata)
            await call.write(router_pb2.AttachRequest(registration=worker.registration))
            assert await is_attached(call)
            calls.append(call)
        error = await own.register(first.registration)
        assert error is not None
        assert error.code == "worker_id_taken", "of two processes with one identity the later one has the id"
        for each in (own, shared):
            await each.channel.close()


@pytest.mark.parametrize("field", ["events", "snapshot", "heartbeat", "registration"])
async def test_attached_worker_speaks_of_its_own_ranks_and_registration_only(field: str) -> None:
    messages = {
        "events": router_pb2.AttachRequest(events=router_pb2.KvEventBatch(data_parallel_rank=1, sequence=1)),
        "snapshot": router_pb2.AttachRequest(snapshot=router_pb2.Snapshot(data_parallel_rank=7, last=True)),
        "heartbeat": router_pb2.AttachRequest(
            heartbeat=router_pb2.Heartbeat(loads=[common_pb2.WorkerLoad(), common_pb2.WorkerLoad()])
        ),
        "registration": router_pb2.AttachRequest(registration=FakeWorker("other", epoch=now_us()).registration),
    }
    async with ready_routers() as (router,):
        honest, liar = FakeWorker("honest", epoch=now_us()), FakeWorker("liar", epoch=now_us())
        await honest.attach(router)
        await honest.store([1, 2, 3])
        await liar.attach(router)
        await liar.write(messages[field])
        await until(lambda: liar.ended is not None)
        assert liar.ended is not None
        assert from_rpc_error(liar.ended, "router").kind is ErrorKind.INVALID_ARGUMENT
        overlaps = await router.stub.GetOverlaps(
            router_pb2.GetOverlapsRequest(
                model=MODEL, prompt=router_pb2.PromptRef(block_hashes=pack_u64([1, 2, 3]), block_size=16)
            )
        )
        assert [(each.worker_id, each.overlap.device_blocks) for each in overlaps.overlaps] == [("honest", 3)]
        assert honest.ended is None
        await honest.detach()
