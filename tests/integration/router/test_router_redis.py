"""Router replicas that share a real Redis: what one learned the others use, through restarts and outages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.types.hashing import block_hashes
from sluice.v1 import router_pb2
from tests.support.clients.callers import prompt, query
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.router_cluster import BLOCK, FakeWorker, RouterProcess, routers
from tests.support.waiting import until

PROMPT = list(range(2_000))
OTHER = list(range(9_000, 11_000))


@pytest.fixture
async def pair(redis: RedisServer) -> AsyncIterator[list[RouterProcess]]:
    async with routers(2, redis_url=redis.url, drain_s=5, redis_timeout_s=10, lease_ms=60_000) as replicas:
        for replica in replicas:
            await until(partial(serving, replica))
        yield replicas


async def serving(router: RouterProcess) -> bool:
    answer = await health_pb2_grpc.HealthStub(router.channel).Check(health_pb2.HealthCheckRequest())
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def names(router: RouterProcess) -> list[str]:
    return [worker.worker_id for worker in (await router.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers]


async def knows(router: RouterProcess, *expected: str) -> None:
    async def check() -> bool:
        return await names(router) == list(expected)

    await until(check)


async def dump(router: RouterProcess) -> list[tuple[Any, ...]]:
    stream = router.stub.DumpIndex(router_pb2.DumpIndexRequest())
    return [(each.worker_id, each.epoch, each.sequence, each.block_hashes) async for each in stream]


async def overlap(router: RouterProcess, tokens: list[int]) -> tuple[str, int]:
    answer = await router.stub.RouteQuery(query(prompt(*tokens)))
    return answer.decode.worker_id, answer.overlap.device_blocks


async def requests_booked(router: RouterProcess) -> dict[str, int]:
    loads = (await router.stub.GetLoads(router_pb2.GetLoadsRequest())).loads
    return {load.worker_id: load.requests for load in loads}


async def test_what_one_replica_learned_the_other_uses(pair: list[RouterProcess]) -> None:
    first, second = pair
    workers = {name: FakeWorker(name) for name in ("w1", "w2")}
    for worker in workers.values():
        await worker.attach(first)
    await knows(second, "w1", "w2")
    chosen = await first.stub.RouteQuery(query(prompt(*PROMPT, 1), "r1"))
    await workers[chosen.decode.worker_id].store(block_hashes(PROMPT, BLOCK))
    await first.stub.MarkPrefillComplete(router_pb2.MarkPrefillCompleteRequest(reservation_ids=[chosen.reservation_id]))

    async def learned() -> bool:
        return (await overlap(second, PROMPT))[1] == len(PROMPT) // BLOCK

    await until(learned)
    met = await second.stub.RouteQuery(query(prompt(*PROMPT, 2), "r2"))
    assert met.decode.worker_id == chosen.decode.worker_id
    assert met.overlap.device_blocks == len(PROMPT) // BLOCK
    assert met.degraded == ""
    elsewhere = await second.stub.RouteQuery(query(prompt(*OTHER), "r3"))
    assert elsewhere.decode.worker_id != chosen.decode.worker_id
    freed = await second.stub.FreeRequest(
        router_pb2.FreeRequestRequest(
            reservation_ids=[each.reservation_id for each in (chosen, met, elsewhere)] + ["tekken:none"]
        )
    )
    assert freed.unknown == 1
    assert await requests_booked(first) == {"w1": 0, "w2": 0}


async def test_replicas_do_not_herd(pair: list[RouterProcess]) -> None:
    for name in ("w1", "w2", "w3", "w4"):
        await FakeWorker(name).attach(pair[0])
    await knows(pair[1], "w1", "w2", "w3", "w4")
    prompts = [list(range(n * 10_000, n * 10_000 + 2_000)) for n in range(40)]
    await asyncio.gather(*(pair[n % 2].stub.RouteQuery(query(prompt(*prompts[n]), f"r{n}")) for n in range(40)))
    assert await requests_booked(pair[1]) == {"w1": 10, "w2": 10, "w3": 10, "w4": 10}


async def test_watchers_at_one_replica_hear_of_workers_at_the_other(pair: list[RouterProcess]) -> None:
    watch = pair[1].stub.WatchWorkers(router_pb2.WatchWorkersRequest())
    worker = FakeWorker("w1")

    async def heard() -> tuple[int, str]:
        change = await asyncio.wait_for(watch.read(), 20)
        assert isinstance(change, router_pb2.WorkerChange)
        return change.kind, change.worker.worker_id

    assert await heard() == (router_pb2.WorkerChange.KIND_SYNCED, "")
    await worker.attach(pair[0])
    assert await heard() == (router_pb2.WorkerChange.KIND_UP, "w1")
    await worker.detach()
    assert await heard() == (router_pb2.WorkerChange.KIND_DOWN, "w1")
    watch.cancel()


async def test_a_large_snapshot_reaches_the_other_replica(pair: list[RouterProcess]) -> None:
    worker = FakeWorker("w1")
    await worker.attach(pair[0])
    hashes = block_hashes(list(range(20_000 * BLOCK)), BLOCK)
    worker.cache, worker.sequence = set(hashes), 7
    await worker.snapshot()
    await until(lambda: worker.acked == 7)

    async def equal() -> bool:
        return await dump(pair[1]) == await dump(pair[0])

    await until(equal)
    assert len((await dump(pair[1]))[0][3]) == 20_000 * 8


async def test_after_a_restart_the_index_is_back_without_the_workers(redis: RedisServer) -> None:
    router = RouterProcess(redis_url=redis.url, lease_ms=60_000)
    await router.start()
    await until(lambda: serving(router))
    worker = FakeWorker("w1")
    await worker.attach(router)
    await worker.store(block_hashes(PROMPT, BLOCK))
    before = await dump(router)
    await router.stop()
    async with routers(redis_url=redis.url, lease_ms=60_000) as (again,):
        await until(lambda: serving(again))
        assert await dump(again) == before
        assert await overlap(again, PROMPT) == ("w1", len(PROMPT) // BLOCK)
        await worker.attach(again)
        assert worker.attached is not None
        assert dict(worker.attached.sequences) == {0: 1}
        await worker.store([1, 2, 3])
        assert worker.resyncs == []


async def test_workers_move_to_another_replica_when_theirs_stops(redis: RedisServer) -> None:
    async with routers(2, redis_url=redis.url) as (stays, _):
        goes = RouterProcess(redis_url=redis.url)
        await goes.start()
        await until(lambda: serving(goes))
        worker = FakeWorker("w1")
        await worker.attach(goes)
        await worker.store(block_hashes(PROMPT, BLOCK))
        await knows(stays, "w1")
        await goes.stop()
        assert await names(stays) == ["w1"]
        await worker.attach(stays)
        assert worker.attached is not None
        assert dict(worker.attached.sequences) == {0: 1}
        assert await overlap(stays, PROMPT) == ("w1", len(PROMPT) // BLOCK)


async def test_a_worker_that_moved_stays_known_when_its_old_stream_ends(pair: list[RouterProcess]) -> None:
    first, second = pair
    old = FakeWorker("w1")
    new = FakeWorker("w1", same_as=old)
    await old.attach(first)
    await old.store([1, 2, 3])
    await new.attach(second)
    assert new.attached is not None
    assert dict(new.attached.sequences) == {0: 1}
    await old.heartbeat()
    await until(lambda: old.ended is not None)
    await new.send(2, [4])
    await until(lambda: new.acked == 2)

    async def equal() -> bool:
        return await dump(first) == await dump(second)

    await until(equal)
    assert await names(first) == await names(second) == ["w1"]


async def test_the_lease_of_a_worker_whose_router_died_runs_out(redis: RedisServer) -> None:
    async with routers(redis_url=redis.url, lease_ms=2_000) as (stays,):
        async with routers(redis_url=redis.url, lease_ms=2_000) as (goes,):
            await until(lambda: serving(goes))
            worker = FakeWorker("w1")
            await worker.attach(goes)

            async def known() -> bool:
                await worker.heartbeat()
                return await names(stays) == ["w1"]

            await until(known)
        await knows(stays)


async def test_without_redis_the_router_waits_and_says_not_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path)
    async with routers(redis_url=server.url, redis_timeout_s=0.5) as (router,):
        await until(lambda: any("cannot be reached" in record.message for record in caplog.records))
        assert not await serving(router)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.stub.RouteQuery(query(prompt(*PROMPT)))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        server.start()
        try:
            await until(lambda: serving(router))
        finally:
            server.stop()


@pytest.mark.parametrize("how", ["lost", "frozen"])
async def test_an_outage_degrades_visibly_and_heals(redis: RedisServer, how: str) -> None:
    async with routers(2, redis_url=redis.url, redis_timeout_s=2, lease_ms=6_000) as (first, second):
        for replica in (first, second):
            await until(partial(serving, replica))
        w1, w2 = FakeWorker("w1"), FakeWorker("w2")
        await w1.attach(first)
        await w2.attach(second)
        w1.keep_beating()
        w2.keep_beating()
        await w1.store(block_hashes(PROMPT, BLOCK))
        await knows(first, "w1", "w2")
        booked = await first.stub.RouteQuery(query(prompt(*PROMPT), "before"))

        if how == "lost":
            redis.stop()
        else:
            redis.freeze()
        away = await first.stub.RouteQuery(query(prompt(*PROMPT), "during"), timeout=30)
        assert (away.decode.worker_id, away.degraded) == ("w1", "store_unavailable")
        assert away.overlap.device_blocks == len(PROMPT) // BLOCK
        again = await first.stub.RouteQuery(query(prompt(*PROMPT), "during"), timeout=30)
        assert (again.decode, again.reservation_id) == (away.decode, away.reservation_id)
        assert await serving(first)
        await w1.store(block_hashes(OTHER, BLOCK), wait=False)

        async def sees_new_blocks() -> bool:
            return await overlap(first, OTHER) == ("w1", len(OTHER) // BLOCK)

        await until(sees_new_blocks)
        w3 = FakeWorker("w3")
        await w3.attach(first)
        w3.keep_beating()
        await w2.detach()
        freed = await first.stub.FreeRequest(router_pb2.FreeRequestRequest(reservation_ids=[booked.reservation_id]))
        assert freed.unknown == 0

        if how == "lost":
            redis.start()
        else:
            redis.thaw()

        async def healed() -> bool:
            answer = await second.stub.RouteQuery(query(prompt(*OTHER)))
            return answer.degraded == "" and answer.overlap.device_blocks == len(OTHER) // BLOCK

        await until(healed)
        await knows(second, "w1", "w3")
        await knows(first, "w1", "w3")
        assert await dump(first) == await dump(second)

        async def only_during_is_booked() -> bool:
            return await requests_booked(second) == {"w1": 1, "w3": 0}

        await until(only_during_is_booked)
        await second.stub.FreeRequest(router_pb2.FreeRequestRequest(reservation_ids=[away.reservation_id]))
        assert await requests_booked(first) == {"w1": 0, "w3": 0}
        for worker in (w1, w3):
            await worker.detach()
