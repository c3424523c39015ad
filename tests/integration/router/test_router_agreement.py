"""Replicas agree in the end: a late one, one that slept through the change stream, one whose store was away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.common.base.packing import pack_u32, pack_u64, unpack_u64
from services.common.types.hashing import block_hashes
from services.router.state.kv_index.events import BlockOp, CacheOperation, EventBatch, Tier
from services.router.state.store.redis import RedisStore
from services.router.state.workers.worker import Role, Worker, WorkerRank
from sluice.v1 import router_pb2
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.router_child import router_children
from tests.support.servers.router_cluster import BLOCK, MODEL, FakeWorker, RouterProcess, routers
from tests.support.waiting import until

RESERVE = router_pb2.RouteQueryRequest.MODE_SELECT_AND_RESERVE


async def dump(router: RouterProcess) -> list[tuple[Any, ...]]:
    stream = router.stub.DumpIndex(router_pb2.DumpIndexRequest())
    return [(each.worker_id, each.sequence, each.block_hashes) async for each in stream]


async def serve(router: RouterProcess, workers: dict[str, FakeWorker], number: int) -> str:
    """One request from its decision to its end; returns why the decision was degraded, if it was."""
    tokens = [number // 5, *range(number * 7 % 200 + 64)]  # five requests share a prefix
    answer = await router.stub.RouteQuery(
        router_pb2.RouteQueryRequest(
            model=MODEL,
            prompt=router_pb2.PromptRef(token_ids=pack_u32(tokens)),
            mode=RESERVE,
            request_id=f"r{number}",
        ),
        timeout=20,
    )
    await workers[answer.decode.worker_id].store(block_hashes(tokens, BLOCK), wait=False)
    await router.stub.FreeRequest(router_pb2.FreeRequestRequest(reservation_ids=[answer.reservation_id]), timeout=20)
    return str(answer.degraded)


async def test_a_replica_that_joins_late_and_an_outage_in_between(redis: RedisServer) -> None:
    workers = {name: FakeWorker(name) for name in ("w1", "w2", "w3")}
    async with routers(redis_url=redis.url, redis_timeout_s=5) as (first,):
        await until(lambda: _agree({}, first))
        for worker in workers.values():
            await worker.attach(first)
            worker.keep_beating()
        for number in range(25):
            assert await serve(first, workers, number) == ""
        async with routers(redis_url=redis.url, redis_timeout_s=5) as (second,):
            await until(lambda: _agree(workers, first, second))
            degraded = []
            for number in range(25, 50):
                if number == 30:
                    redis.stop()
                if number == 40:
                    redis.start()
                degraded.append(await serve((first, second)[number % 2], workers, number))
            assert degraded[:5] == [""] * 5
            assert set(degraded[5:15]) == {"store_unavailable"}
            await until(lambda: _agree(workers, first, second), timeout_s=60)
            store = RedisStore(redis.url, timeout_s=10)
            for worker in workers.values():
                found = await store.blocks(MODEL, WorkerRank(worker.worker_id, 0))
                assert found is not None
                assert found[1].sequence == worker.sequence
                assert set(unpack_u64(found[1].tiers[Tier.DEVICE])) == worker.cache
            await store.close()
            for worker in workers.values():
                await worker.detach()


async def _agree(workers: dict[str, FakeWorker], *replicas: RouterProcess) -> bool:
    expected = [(name, each.sequence, pack_u64(sorted(each.cache))) for name, each in sorted(workers.items())]
    try:
        dumps = [await dump(replica) for replica in replicas]
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:  # it is starting
            raise
        return False
    return all(each == expected for each in dumps)


async def test_a_replica_that_slept_while_the_stream_was_trimmed_reads_anew(redis: RedisServer, tmp_path: Path) -> None:
    store = RedisStore(redis.url, timeout_s=30, feed_limit=100)
    worker = Worker("w", "w:1", 1, MODEL, Role.AGGREGATED, BLOCK, "sluice-xxh3-v1", 100_000, 1, b"")
    async with router_children(2, tmp_path, "--redis-url", redis.url, "--redis-timeout-s", "20") as (awake, asleep):
        await store.register(worker, "s", 600_000)
        await store.apply(MODEL, "w", 1, 100_000, [batch(1)])
        await until(lambda: _hold(asleep, 1))
        asleep.freeze()
        await store.apply(MODEL, "w", 1, 100_000, [batch(sequence) for sequence in range(2, 2_001)])
        await until(lambda: _hold(awake, 2_000))
        asleep.thaw()
        await until(lambda: _hold(asleep, 2_000), timeout_s=60)
        assert await awake.dump() == await asleep.dump()
        assert "fell behind the change feed" in asleep.log
    await store.close()


def batch(sequence: int) -> EventBatch:
    return EventBatch(0, sequence, (BlockOp(CacheOperation.STORED, Tier.DEVICE, pack_u64([sequence])),))


async def _hold(router: Any, blocks: int) -> bool:
    return sum(len(each[-1]) // 8 for each in await router.dump()) == blocks


async def test_leases_end_by_the_clock_of_redis(redis: RedisServer) -> None:
    """A router whose own clock is years ahead neither ends leases early nor reservations."""
    store = RedisStore(redis.url, timeout_s=10)
    worker = Worker("w", "w:1", 1, MODEL, Role.AGGREGATED, BLOCK, "sluice-xxh3-v1", 100, 1, b"")
    await store.register(worker, "s", 60_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", lambda: 9e9)
        patch.setattr("time.time_ns", lambda: int(9e18))
        assert await store.sweep(MODEL, 6_000) == 0
    assert (await store.load(MODEL)).workers == [worker]
    await store.register(worker, "s", 1)
    await asyncio.sleep(0.01)
    assert await store.sweep(MODEL, 6_000) == 1
    await store.close()
