"""Reservations, leases and memory of both stores."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
from redis.asyncio import Redis

from services.router.state.kv_index.events import BlockOp, CacheOperation, EventBatch, Snapshot, Tier, WorkerUp
from services.router.state.reservations.cost import Load, Offer
from services.router.state.reservations.table import Owner, Reservation, ReservationParams
from services.router.state.store.base import Store
from services.router.state.store.memory import MemoryStore, unix_ms
from services.router.state.store.redis import RedisStore
from services.router.state.sync.model_state import ModelState
from services.router.state.workers.registry import Registry
from services.router.state.workers.worker import Role, Worker, WorkerRank
from tests.support.servers.redis_server import RedisServer

M = "m"
A = WorkerRank("a", 0)
OFFER = Offer(A, 5.0, 5.0, 0, 5_000, 7_000)  # two of the seven blocks are expected output
LONG = 600_000


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "memory":
        made: Store = MemoryStore(random=Random(1))
    else:
        server: RedisServer = request.getfixturevalue("shared_redis")
        made = RedisStore(server.url, prefix=tmp_path.name, timeout_s=10, random=Random(1))
    await made.ping()
    yield made
    await made.close()


def terms(request_id: str, owner: str = "", lease_ms: int = LONG) -> ReservationParams:
    return ReservationParams(request_id, LONG, output=2_000, owner=Owner(owner, lease_ms) if owner else None)


async def load(store: Store) -> Load | None:
    return (await store.pulse(M)).loads.get(A)


async def test_output_is_booked_once_it_is_longer_than_expected(store: Store) -> None:
    await store.select(M, [OFFER], terms("r"))
    assert await store.progress(M, {"r": 1_000, "unknown": 9_000}) == ["unknown"]
    assert await load(store) == Load(5, 7, 1)
    assert await store.progress(M, {"r": 3_000}) == []
    assert await load(store) == Load(5, 8, 1)
    await store.progress(M, {"r": 3_000})
    await store.progress(M, {"r": 2_500})
    assert await load(store) == Load(5, 8, 1), "said twice or late it changes nothing"
    await store.progress(M, {"r": 10_000})
    assert await load(store) == Load(5, 15, 1)
    assert await store.mark_prefill_complete(M, ["r"]) == []
    assert await load(store) == Load(0, 15, 1)
    assert await store.free(M, ["r"]) == []
    assert await load(store) is None
    assert await store.progress(M, {"r": 20_000}) == ["r"]
    assert (await store.pulse(M)).loads == {}


async def test_a_reservation_booked_elsewhere_brings_its_output_and_owner(store: Store) -> None:
    mine = Reservation("r", A, 5_000, 9_000, unix_ms() + LONG, output=4_000, owner=Owner("gone", 1))
    await store.book(M, mine)
    await store.progress(M, {"r": 4_000})
    assert await load(store) == Load(5, 9, 1)
    await store.progress(M, {"r": 5_000})
    assert await load(store) == Load(5, 10, 1)
    await asyncio.sleep(0.02)
    assert await store.sweep_owners(M) == 1
    assert (await store.pulse(M)).loads == {}


async def test_expired_owner_loses_only_its_reservations(store: Store) -> None:
    for number in range(3):
        await store.select(M, [OFFER], terms(f"crashed-{number}", "crashed", 2_000))
        await store.select(M, [OFFER], terms(f"alive-{number}", "alive"))
        await store.select(M, [OFFER], terms(f"unknown-{number}"))
    assert await store.sweep_owners(M) == 0
    await asyncio.sleep(2.2)
    await store.free(M, ["crashed-0"])
    assert await store.sweep_owners(M) == 2
    assert await store.sweep_owners(M) == 0
    assert await load(store) == Load(30, 42, 6)
    assert await store.free(M, ["crashed-1", "alive-0", "alive-1", "alive-2"]) == ["crashed-1"]
    assert await load(store) == Load(15, 21, 3)


async def test_a_lease_is_renewed_by_its_owner_and_by_booking(store: Store) -> None:
    await store.renew_owners(M, ["a", "stranger"], 1)
    await store.select(M, [OFFER], terms("r1", "a", 300))
    await store.renew_owners(M, ["a", "stranger"], LONG)
    await store.select(M, [OFFER], terms("r2", "a", 1))
    await store.select(M, [OFFER], terms("r3", "b", 1))
    await store.select(M, [OFFER], terms("r4", "b", LONG))
    await asyncio.sleep(0.35)
    assert await store.sweep_owners(M) == 0, "a shorter renewal never shortens a lease"
    assert await load(store) == Load(20, 28, 4)


async def test_a_retry_keeps_its_first_owner(store: Store) -> None:
    first = await store.select(M, [OFFER], terms("r", "a", LONG))
    again = await store.select(M, [OFFER], terms("r", "b", 1))
    assert (again.slot, again.expires_unix_ms, again.repeated) == (first.slot, first.expires_unix_ms, True)
    await asyncio.sleep(0.02)
    assert await store.sweep_owners(M) == 0
    assert await load(store) == Load(5, 7, 1)


async def test_more_reservations_than_one_sweep_clears_go_with_the_next(store: Store) -> None:
    for number in range(700):
        await store.select(M, [OFFER], terms(f"r{number}", "crashed", 1))
    await asyncio.sleep(0.02)
    cleared = 0
    while count := await store.sweep_owners(M):
        cleared += count
    assert cleared == 700
    assert (await store.pulse(M)).loads == {}


async def test_what_a_worker_cannot_have_any_more_is_given_back_oldest_first(store: Store) -> None:
    b = OFFER._replace(slot=WorkerRank("a", 1))
    for number in range(4):
        await store.select(M, [OFFER], terms(f"old-{number}", "owner" if number else ""))
        await asyncio.sleep(0.01)
    await store.select(M, [b], terms("other-rank"))
    await store.mark_prefill_complete(M, ["old-2"])
    assert await store.correct(M, A, 0, 60_000, True) == (0, 0), "nothing is old enough"
    assert await store.correct(M, A, 5, 1, False) == (0, 0)
    await asyncio.sleep(2.2)
    await store.select(M, [OFFER], terms("young"))
    assert await store.correct(M, A, 2, 2_000, True) == (2, 1)
    assert await load(store) == Load(5, 21, 3)
    assert await store.correct(M, A, 2, 2_000, True) == (0, 0), "twice is once"
    assert await store.free(M, ["old-0", "old-1", "old-2", "old-3", "young", "other-rank"]) == ["old-0", "old-1"]
    assert (await store.pulse(M)).loads == {}


WORKERS = 8
BLOCKS = 160_000
EACH = BLOCKS // WORKERS


def worker(number: int) -> Worker:
    return Worker(f"w{number}", "w:1", 1, "m", Role.AGGREGATED, 16, "sluice-xxh3-v1", EACH, 1, b"")


async def fill(store: Store, view: ModelState | None = None) -> None:
    """Random blocks for every worker, a snapshot each, and with a view event by event."""
    for number in range(WORKERS):
        card = worker(number)
        await store.register(card, "s", 600_000)
        if view is None:
            await store.replace("m", card.worker_id, 1, EACH, Snapshot(0, 1, (os.urandom(EACH * 8), b"", b"")))
            continue
        view.apply(WorkerUp(card))
        for sequence in range(1, EACH // 50 + 1):
            batch = EventBatch(0, sequence, (BlockOp(CacheOperation.STORED, Tier.DEVICE, os.urandom(400)),))
            await store.apply("m", card.worker_id, 1, EACH, [batch])


async def test_100_bytes_a_block_in_the_embedded_store_and_its_view() -> None:
    store = MemoryStore(feed_limit=1)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        view = ModelState("m", Registry(), store.index("m"))
        await fill(store, view)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert view.index.distinct_blocks == BLOCKS
    assert (after - before) / BLOCKS <= 100


async def test_80_bytes_a_block_in_redis(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    store = RedisStore(server.url, timeout_s=30)
    try:
        async with Redis(port=server.port) as raw:
            before = (await raw.info("memory"))["used_memory"]
            await fill(store)
            after = (await raw.info("memory"))["used_memory"]
    finally:
        await store.close()
        server.stop()
    assert (after - before) / BLOCKS <= 80
