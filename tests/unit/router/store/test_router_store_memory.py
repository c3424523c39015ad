"""What a block costs: once in the embedded store and its view together, and in a real Redis."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

from redis.asyncio import Redis

from services.router.kv_index.events import BlockOp, EventBatch, Kind, Snapshot, Tier, WorkerUp
from services.router.store.base import Store
from services.router.store.memory import MemoryStore
from services.router.store.redis import RedisStore
from services.router.sync.model_state import ModelState
from services.router.workers.registry import Registry
from services.router.workers.worker import Role, Worker
from tests.support.servers.redis_server import RedisServer

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
            batch = EventBatch(0, sequence, (BlockOp(Kind.STORED, Tier.DEVICE, os.urandom(400)),))
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
