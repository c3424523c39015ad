"""Ten router replicas choose and book at once on one Redis: nothing is lost, no herd forms, all returns to zero."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from services.common.base.packing import pack_u64
from services.router.scheduling.queries import Prompt, Query, RouteResult
from services.router.state.reservations.cost import CostModel
from services.router.state.store.redis import RedisStore
from tests.support.oracles.replication import MODEL, Engine, Replica
from tests.support.servers.redis_server import RedisServer
from tests.support.waiting import until

REPLICAS = 10
WORKERS = 8
CALLS = 10_000
BLOCKS = 4


@pytest.fixture
async def replicas(redis: RedisServer) -> AsyncIterator[list[Replica]]:
    made = [Replica(redis, timeout_s=30) for _ in range(REPLICAS)]
    for replica in made:
        replica.start()
    for replica in made:
        await asyncio.wait_for(replica.router.ready.wait(), 30)
    yield made
    await asyncio.gather(*(replica.stop() for replica in made))


def query(number: int, ttl_ms: int = 600_000) -> Query:
    """A prompt of its own."""
    hashes = pack_u64(range(number * BLOCKS + 1, number * BLOCKS + 1 + BLOCKS))
    prompt = Prompt(block_hashes=hashes, hash_scheme="sluice-xxh3-v1", block_size=16, prompt_tokens=BLOCKS * 16)
    return Query(MODEL, prompt, CostModel(), f"r{number}", ttl_ms=ttl_ms)


async def test_ten_replicas_book_ten_thousand_requests_at_once(redis: RedisServer, replicas: list[Replica]) -> None:
    engines = [Engine(f"w{number}", 1) for number in range(WORKERS)]
    for engine, replica in zip(engines, replicas, strict=False):
        await engine.attach(replica)
    await until(lambda: all(len(replica.router.registry.workers(MODEL)) == WORKERS for replica in replicas))

    async def book(number: int, ttl_ms: int = 600_000) -> RouteResult:
        return await replicas[number % REPLICAS].router.query(query(number, ttl_ms))

    routes = await asyncio.gather(*(book(number) for number in range(CALLS)))
    assert Counter(route.degraded for route in routes) == {"": CALLS}
    granted = Counter(route.worker.worker_id for route in routes)
    loads = {slot.worker_id: load for slot, (_, load) in (await replicas[0].router.loads(MODEL)).items()}
    assert {name: load.requests for name, load in loads.items()} == granted
    assert {name: load.prefill for name, load in loads.items()} == {name: n * BLOCKS for name, n in granted.items()}
    assert sum(load.decode for load in loads.values()) == CALLS * BLOCKS
    fair = CALLS / WORKERS
    assert max(abs(count - fair) for count in granted.values()) <= 0.05 * fair

    again = await asyncio.gather(*(replicas[number % 7].router.query(query(number)) for number in range(0, CALLS, 50)))
    assert [each.reservation_id for each in again] == [route.reservation_id for route in routes[::50]]
    assert [each.worker for each in again] == [route.worker for route in routes[::50]]

    ids = [route.reservation_id for route in routes]
    shares = [ids[number::REPLICAS] for number in range(REPLICAS)]
    halves = [share[: len(share) // 2] for share in shares]
    marked = [
        replica.router.lifecycle.mark_prefill_complete(half) for replica, half in zip(replicas, halves, strict=True)
    ]
    assert await asyncio.gather(*marked) == [0] * REPLICAS
    freed = [replica.router.lifecycle.free(share) for replica, share in zip(reversed(replicas), shares, strict=True)]
    assert await asyncio.gather(*freed) == [0] * REPLICAS
    await asyncio.gather(*(book(number, ttl_ms=1) for number in range(CALLS, CALLS + 500)))

    sweeper = RedisStore(redis.url, timeout_s=30)
    async with Redis(port=redis.port) as raw:
        names = ("prefill", "decode", "requests", "reservations", "expiries", *(f"booked:{e.name}" for e in engines))

        async def nothing_left() -> bool:
            await sweeper.sweep(MODEL, 6_000)  # a router waits for a whole lease first
            return await raw.exists(*(f"{{sluice:{MODEL}}}:{name}" for name in names)) == 0

        await until(nothing_left, timeout_s=60)
    await sweeper.close()
    for replica in replicas:
        assert {tuple(load) for _, load in (await replica.router.loads(MODEL)).values()} == {(0, 0, 0)}
        assert replica.deaths == []
