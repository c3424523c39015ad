"""A replica changes its view itself and by the feed: whatever comes first, in the end the view is what the store is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from services.router.router import Router
from services.router.state.kv_index.events import WorkerDown, WorkerUp
from services.router.state.kv_index.index import BlockIndex
from services.router.state.store.base import StoredModel, StoreUnavailable
from services.router.state.store.memory import MemoryStore
from services.router.state.sync.model_state import ModelState
from services.router.state.workers.registry import Registry
from services.router.state.workers.worker import Role, Worker
from tests.support.waiting import until

MODEL = "m"


class SharedStore(MemoryStore):
    """Many routers' store, as Redis is: each has an index of its own. Answers can be held back or lost."""

    embedded = False

    def __init__(self) -> None:
        super().__init__()
        self.removed = asyncio.Event()
        self.answering = asyncio.Event()
        self.answering.set()
        self.lost_answers = 0
        self.loading = asyncio.Event()
        self.reachable = asyncio.Event()
        self.reachable.set()

    def index(self, model: str) -> BlockIndex | None:  # type: ignore[override]
        return None

    async def ping(self) -> None:
        await self.reachable.wait()

    async def remove(
        self, model: str, worker_id: str, session: str, keep_reservations: bool = False, awaited_ms: int = 0
    ) -> bool:
        owned = await super().remove(model, worker_id, session, keep_reservations, awaited_ms)
        self.removed.set()
        await self.answering.wait()
        if self.lost_answers:
            self.lost_answers -= 1
            raise StoreUnavailable("a test")
        return owned

    async def load(self, model: str) -> StoredModel:
        self.loading.set()
        await self.answering.wait()
        return await super().load(model)


def worker(epoch: int = 1) -> Worker:
    return Worker(
        "w", "w:1", epoch, MODEL, Role.AGGREGATED, 16, "sluice-xxh3-v1", 100, 1, b"", lease_digest="one process"
    )


@asynccontextmanager
async def routers(store: SharedStore) -> AsyncIterator[tuple[Router, Router]]:
    deaths: list[str] = []
    pair = [Router(store, random=Random(1), on_death=lambda name, error: deaths.append(name)) for _ in range(2)]
    for router in pair:
        router.start()
    await asyncio.gather(*(router.ready.wait() for router in pair))
    try:
        yield pair[0], pair[1]
    finally:
        store.answering.set()
        for router in pair:
            await router.close()
    assert deaths == []


def holds(router: Router) -> bool:
    return any(view.index.slots for view in router.indexes(MODEL)) and bool(router.registry.workers(MODEL))


async def test_a_replica_that_alone_lost_the_store_for_a_moment_reads_it_anew() -> None:
    store = SharedStore()
    async with routers(store) as (one, two):
        old, _ = await one.worker_manager.attach(worker())
        await two.worker_manager.attach(worker())
        store.lost_answers = 1
        store.reachable.clear()
        one.worker_manager.detach(old)  # its reader of the feed never notices a thing
        await until(lambda: not holds(one))
        store.reachable.set()
        await until(lambda: holds(one))
        assert holds(two)


async def test_answer_older_than_the_feed_is_ignored() -> None:
    store = SharedStore()
    async with routers(store) as (one, two):
        old, _ = await one.worker_manager.attach(worker())
        await until(lambda: holds(two))
        store.answering.clear()
        one.worker_manager.detach(old)
        await store.removed.wait()
        await until(lambda: not holds(one))
        await two.worker_manager.attach(worker())
        await until(lambda: holds(one))
        store.answering.set()
        await asyncio.sleep(0.05)
        assert holds(one)
        assert holds(two)


@pytest.mark.parametrize("there", [True, False], ids=["registered", "removed"])
async def test_change_during_a_rebuild_is_not_applied_twice(there: bool) -> None:
    store = SharedStore()
    view = ModelState(MODEL, registry := Registry())
    view.apply(WorkerUp(worker()))
    if there:
        await store.register(worker(), "s", 60_000)
    store.answering.clear()
    rebuilding = asyncio.create_task(view.rebuild(store))
    await store.loading.wait()
    view.apply(WorkerDown("w", 1) if there else WorkerUp(worker()))
    store.answering.set()
    await rebuilding
    assert (registry.get(MODEL, "w") is not None) is there


async def test_answer_older_than_a_rebuild_is_superseded() -> None:
    store = SharedStore()
    await store.register(worker(), "s", 60_000)
    view = ModelState(MODEL, registry := Registry())
    with view.pending_change("w") as pending:
        await view.rebuild(store)
    assert pending.superseded
    assert registry.get(MODEL, "w") is not None
