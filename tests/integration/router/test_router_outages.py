"""Redis away for 20 s under load, and routers that are killed: what callers see meanwhile and what is left after."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from services.common.base.packing import pack_u64
from services.router.state.kv_index.events import Snapshot
from services.router.state.store.redis import RedisStore
from services.router.state.workers.worker import Role, Worker
from sluice.v1 import router_pb2
from tests.support.clients.callers import prompt, query
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.router_child import RouterChild, router_children
from tests.support.servers.router_cluster import BLOCK, MODEL, FakeWorker
from tests.support.waiting import until

AWAY_S = 20
CALLERS = 16
MILLION = 1_000_000


class Load:
    """Callers that reserve and free as fast as they can, in turn at each router."""

    def __init__(self, routers: list[RouterChild]) -> None:
        self._routers = routers
        self.answers: Counter[str] = Counter()
        self.slowest_s = 0.0
        self.running = True

    async def call(self, caller: int) -> None:
        number = 0
        while self.running:
            number += 1
            router = self._routers[number % len(self._routers)]
            started = time.monotonic()
            tokens = [caller, *range(number % 40 * BLOCK)]
            answer = await router.stub.RouteQuery(query(prompt(*tokens), f"c{caller}-{number}"), timeout=20)
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)
            self.answers[answer.degraded] += 1
            freed = router_pb2.FreeRequestRequest(reservation_ids=[answer.reservation_id])
            await self._routers[(number + 1) % len(self._routers)].stub.FreeRequest(freed, timeout=20)
            await asyncio.sleep(0.01)


async def booked(router: RouterChild) -> set[int]:
    return {load.requests for load in (await router.stub.GetLoads(router_pb2.GetLoadsRequest(), timeout=20)).loads}


@pytest.mark.slow
async def test_redis_away_for_20_s_under_load_fails_no_query(redis: RedisServer, tmp_path: Path) -> None:
    flags = ("--redis-url", redis.url, "--reservation-ttl-s", "30")
    async with router_children(2, tmp_path, *flags) as routers:
        workers = [FakeWorker(f"w{number}") for number in range(4)]
        for number, worker in enumerate(workers):
            await worker.attach(routers[number % 2])
            worker.keep_beating()
        load = Load(routers)
        calls = [asyncio.create_task(load.call(caller)) for caller in range(CALLERS)]

        async def store_for(seconds: float) -> None:
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                for worker in workers:
                    await worker.store([worker.sequence * 100 + n for n in range(8)], wait=False)
                await asyncio.sleep(0.2)

        await store_for(3)
        before = Counter(load.answers)
        redis.stop()
        await store_for(AWAY_S)
        during = load.answers - before
        redis.start()
        await store_for(10)
        after = load.answers - before - during
        load.running = False
        await asyncio.gather(*calls)  # raises what any query raised
        print(f"before {before}, during {during}, after {after}, slowest {load.slowest_s:.3f} s")
        assert set(before) == {""}
        assert during["store_unavailable"] > 0.9 * during.total()
        assert after[""] > 0

        expected = {worker.worker_id: pack_u64(sorted(worker.cache)) for worker in workers}

        async def agree() -> bool:
            one, two = await routers[0].dump(), await routers[1].dump()
            return one == two and {each[0]: each[-1] for each in one} == expected

        await until(agree, timeout_s=60)

        async def nothing_booked() -> bool:
            return await booked(routers[0]) | await booked(routers[1]) == {0}

        await until(nothing_booked, timeout_s=90)
        for worker in workers:
            await worker.detach()


async def test_a_killed_router_is_replaced_by_the_other(redis: RedisServer, tmp_path: Path) -> None:
    tokens = list(range(640))
    flags = ("--redis-url", redis.url, "--redis-timeout-s", "10", "--lease-ms", "60000")
    async with router_children(2, tmp_path, *flags) as (killed, stays):
        worker = FakeWorker("w")
        await worker.attach(killed)
        await worker.store([1, 2, 3])

        async def agree() -> bool:
            listed = (await stays.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers
            return bool(listed) and bool(await killed.dump()) and await killed.dump() == await stays.dump()

        await until(agree)
        booked_at_first = await killed.stub.RouteQuery(query(prompt(*tokens), "r"), timeout=20)
        await killed.kill()
        again = await stays.stub.RouteQuery(query(prompt(*tokens), "r"), timeout=20)
        assert (again.decode.worker_id, again.reservation_id) == ("w", booked_at_first.reservation_id)
        await worker.attach(stays)
        assert worker.attached is not None
        assert dict(worker.attached.sequences) == {0: 1}
        await killed.start()
        assert await killed.dump() == await stays.dump()
        freed = router_pb2.FreeRequestRequest(reservation_ids=[again.reservation_id])
        assert (await killed.stub.FreeRequest(freed, timeout=20)).unknown == 0
        assert await booked(stays) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 100])
async def test_a_router_is_back_in_3_s_with_a_million_blocks(redis: RedisServer, tmp_path: Path, count: int) -> None:
    store = RedisStore(redis.url, timeout_s=30)
    for number in range(count):
        worker = Worker(
            f"w{number}", f"w:{number}", 1, MODEL, Role.AGGREGATED, BLOCK, "sluice-xxh3-v1", MILLION, 1, b""
        )
        await store.register(worker, "s", 600_000)
        hashes = os.urandom(MILLION // count * 8)
        await store.replace(MODEL, worker.worker_id, 1, MILLION, Snapshot(0, 1, (hashes, b"", b"")))
    await store.close()
    router = RouterChild(tmp_path, "--redis-url", redis.url)
    try:
        first = await router.start()
        await router.kill()
        again = await router.start()
        cpu_s = router.cpu_s
        print(f"{count} workers: serving after {first:.2f} s and {again:.2f} s, {cpu_s:.2f} s of CPU")
        assert sum(len(each[-1]) // 8 for each in await router.dump()) == MILLION // count * count
        assert min(first, again, cpu_s) < 3
    finally:
        await router.stop()
