"""The store comes back, perhaps only to go again: what happened meanwhile is told once, whatever comes in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from services.common.base.packing import pack_u64, unpack_u64
from services.router.registration.stream import WorkerStream
from services.router.registration.stream_messages import SnapshotChunk
from services.router.router import Router
from services.router.scheduling.decisions import Outcome
from services.router.state.kv_index.events import BlockOp, CacheOperation, EventBatch, Snapshot, Tier
from services.router.state.kv_index.index import BlockIndex
from services.router.state.reservations.cost import Limits, Load, Offer
from services.router.state.reservations.ids import prefill_id, reservation_id
from services.router.state.reservations.table import AllBusy, Reservation, ReservationParams, ReservedRank
from services.router.state.store.base import StoredModel, StoreUnavailable
from services.router.state.store.memory import MemoryStore
from services.router.state.store.store_health import StoreHealth
from services.router.state.sync.model_state import ModelState
from services.router.state.sync.reservation_manager import ReservationManager
from services.router.state.workers.registry import Registry
from services.router.state.workers.worker import Role, Worker, WorkerRank
from tests.support.waiting import settle

MODEL = "m"
A = WorkerRank("a", 0)
OFFER = Offer(A, 5.0, 5.0, 0, 5_000, 7_000)
TERMS = ReservationParams("r", 600_000)


class HeldStore(MemoryStore):
    """Many routers' store, whose answers can be held back."""

    embedded = False

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.answering = asyncio.Event()
        self.held = ""
        self.generation = b""

    def index(self, model: str) -> BlockIndex | None:  # type: ignore[override]
        return None

    @asynccontextmanager
    async def during(self, what: str, *jobs: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
        """Runs jobs as far as they ask the store this, then the body, then the rest of them."""
        self.held = what
        running = asyncio.gather(*jobs)
        await self.asked.wait()
        yield
        self.answering.set()
        await running

    async def _wait(self, what: str) -> None:
        if what == self.held:
            self.asked.set()
            await self.answering.wait()

    async def register(self, worker: Worker, session: str, lease_ms: int) -> dict[int, int]:
        await self._wait("register")
        return await super().register(worker, session, lease_ms)

    async def remove(
        self, model: str, worker_id: str, session: str, keep_reservations: bool = False, awaited_ms: int = 0
    ) -> bool:
        await self._wait("remove")
        return await super().remove(model, worker_id, session, keep_reservations, awaited_ms)

    async def book(self, model: str, reservation: Reservation) -> None:
        said = replace(reservation)  # it travels as it is now
        await self._wait("book")
        await super().book(model, said)

    async def load(self, model: str) -> StoredModel:
        state = await super().load(model)
        return StoredModel(state.position, state.workers, self.generation)

    async def blocks(self, model: str, slot: WorkerRank) -> tuple[int, Snapshot] | None:
        await self._wait("blocks")
        return await super().blocks(model, slot)


def worker(worker_id: str = "w", epoch: int = 1) -> Worker:
    return Worker(worker_id, f"{worker_id}:1", epoch, MODEL, Role.AGGREGATED, 16, "sluice-xxh3-v1", 100, 1, b"")


async def registered(store: MemoryStore) -> list[str]:
    return [each.worker_id for each in (await MemoryStore.load(store, MODEL)).workers]


# The load book


async def test_concurrent_replays_book_once() -> None:
    store = HeldStore()
    bookkeeper = ReservationManager(store, StoreHealth(store), Random(1))
    await bookkeeper.select(MODEL, [OFFER], TERMS, {})  # the store is away: booked here
    async with store.during("book", bookkeeper.replay(), bookkeeper.replay()):
        pass
    assert (await store.pulse(MODEL)).loads[A].requests == 1
    await store.free(MODEL, ["r"])
    assert (await store.pulse(MODEL)).loads == {}


async def test_prompt_computed_during_its_booking_is_no_load() -> None:
    store = HeldStore()
    bookkeeper = ReservationManager(store, StoreHealth(store), Random(1))
    await bookkeeper.select(MODEL, [OFFER], TERMS, {})
    async with store.during("book", bookkeeper.replay()):
        assert await bookkeeper.mark_prefill_complete(MODEL, ["r"]) == 0
    load = (await store.pulse(MODEL)).loads[A]
    assert (load.prefill, load.decode, load.requests) == (0, 7, 1)


async def test_prompt_with_a_lost_store_answer_can_be_marked_computed() -> None:
    store = HeldStore()
    bookkeeper = ReservationManager(store, StoreHealth(store), Random(1))
    await store.select(MODEL, [OFFER], TERMS)  # its answer was lost
    await bookkeeper.select(MODEL, [OFFER], TERMS, {})
    await bookkeeper.mark_prefill_complete(MODEL, ["r"])
    await bookkeeper.replay()
    load = (await store.pulse(MODEL)).loads[A]
    assert (load.prefill, load.decode, load.requests) == (0, 7, 1)


class Unheard(MemoryStore):
    """Books, and its answer is lost."""

    lost = True

    async def select(self, model: str, offers: Sequence[Offer], terms: ReservationParams) -> ReservedRank:
        choice = await super().select(model, offers, terms)
        if self.lost:
            raise StoreUnavailable("a test")
        return choice


@pytest.mark.parametrize("again", ["", "there", "away"])
async def test_refused_request_with_a_lost_store_answer_is_not_booked(again: str) -> None:
    store = Unheard()
    health = StoreHealth(store)
    keeping = asyncio.create_task(health.keep(_nothing))
    await health.wait()
    bookkeeper = ReservationManager(store, health, Random(1))
    limited = OFFER._replace(limits=Limits(1e6, 1e6, 5))
    with pytest.raises(AllBusy):
        await bookkeeper.select(MODEL, [limited], TERMS, {A: Load(0, 0, 5)})
    store.lost = False
    if again == "there":  # a queued query is sent again
        await health.wait()
    if again:
        await bookkeeper.select(MODEL, [limited], TERMS, {})
    await bookkeeper.replay()
    assert [load.requests for load in (await store.pulse(MODEL)).loads.values()] == ([1] if again else [])
    keeping.cancel()


@pytest.mark.parametrize("settling", [False, True], ids=["before", "while"])
async def test_pair_freed_by_another_replica_is_not_booked_after_recovery(settling: bool) -> None:
    store = HeldStore()
    router = Router(store, random=Random(1))
    router._replica.synchronizer.view(MODEL)
    for request_id in ("r", prefill_id("r"), "other"):
        await router._replica.reservations.select(MODEL, [OFFER], replace(TERMS, request_id=request_id), {})
    over = Outcome(reservation_id(MODEL, "r", paired=True), 0, 5)
    if settling:
        async with store.during("book", router._recover()):
            await router.lifecycle.free([], [over])  # as on every replica
    else:
        await router.lifecycle.free([], [over])
        await router._recover()
    assert (await store.pulse(MODEL)).loads[A].requests == 1
    await router.close()


# Workers


async def test_a_worker_that_goes_while_others_are_registered_again_stays_gone() -> None:
    store = HeldStore()
    router = Router(store, random=Random(1))
    await router.worker_manager.attach(worker("stays"))
    gone, _ = await router.worker_manager.attach(worker("goes"))
    async with store.during("register", router._recover()):
        router.worker_manager.detach(gone)
        await settle(50)
    assert await registered(store) == ["stays"]
    await router.close()


async def test_worker_lost_during_a_notification_is_notified_too() -> None:
    store = HeldStore()
    router = Router(store, random=Random(1))
    pair = [(await router.worker_manager.attach(worker(name)))[0] for name in ("first", "second")]
    router.worker_manager.detach(pair[0])
    await settle(50)
    async with store.during("remove", router._recover()):
        router.worker_manager.detach(pair[1])
        await settle(50)
    assert await registered(store) == []
    await router.close()


async def test_worker_lost_during_reconciliation_is_notified_too() -> None:
    store = HeldStore()
    router = Router(store, random=Random(1))
    gone, _ = await router.worker_manager.attach(worker())
    await router._replica.reservations.select(MODEL, [OFFER], TERMS, {})
    async with store.during("book", router._recover()):
        router.worker_manager.detach(gone)
        await settle(50)
    assert await registered(store) == []
    await router.close()


async def test_a_snapshot_on_its_way_when_the_store_returns_is_taken_as_a_whole() -> None:
    store = MemoryStore()
    health = StoreHealth(store)
    keeping = asyncio.create_task(health.keep(_nothing))
    await health.wait()
    attachment = WorkerStream(worker(), store, health, ModelState(MODEL, Registry(), store.index(MODEL)), 60_000)
    await attachment.open()
    await attachment.handle(
        [EventBatch(0, 2, (BlockOp(CacheOperation.STORED, Tier.DEVICE, pack_u64([2])),))]
    )  # 1 was lost
    await attachment.handle([SnapshotChunk(0, 2, Tier.DEVICE, pack_u64([1]), False)])
    await attachment.reopen()  # the store does not hold what the worker has said
    replies = await attachment.handle([SnapshotChunk(0, 2, Tier.DEVICE, pack_u64([2]), True)])
    found = await store.blocks(MODEL, WorkerRank("w", 0))
    assert found is not None
    assert sorted(unpack_u64(found[1].tiers[Tier.DEVICE])) == [1, 2]
    assert replies.acks == {0: 2}
    keeping.cancel()


async def _nothing() -> None:
    return None


# The view


async def lost_its_store() -> tuple[HeldStore, ModelState, Registry]:
    """A view that has a worker whose store has forgotten everything."""
    store = HeldStore()
    view = ModelState(MODEL, registry := Registry())
    await store.register(worker(), "s", 60_000)
    store.generation = b"first"
    await view.rebuild(store)
    await store.remove(MODEL, "w", "s")
    store.generation = b"second"
    await view.rebuild(store)
    assert registry.get(MODEL, "w") is not None
    return store, view, registry


async def test_a_worker_that_a_second_look_at_the_store_found_is_no_orphan() -> None:
    store, view, registry = await lost_its_store()
    await store.register(worker(), "s", 60_000)
    await view.rebuild(store)
    view.drop_orphans(0)
    assert registry.get(MODEL, "w") is not None


async def test_orphan_dropped_while_the_store_restores_it_stays() -> None:
    store, view, registry = await lost_its_store()
    await store.register(worker(), "s", 60_000)
    async with store.during("blocks", view.rebuild(store)):
        view.drop_orphans(0)
    assert registry.get(MODEL, "w") is not None


async def test_an_orphan_keeps_its_lease_however_often_the_store_is_read() -> None:
    store, view, registry = await lost_its_store()
    await view.rebuild(store)
    assert registry.get(MODEL, "w") is not None
    view.drop_orphans(0)
    assert registry.get(MODEL, "w") is None


# The link


class Halfway(MemoryStore):
    """Says that it is there and then does nothing, as a Redis that is full or was made a replica."""

    embedded = False

    def __init__(self) -> None:
        super().__init__()
        self.pings = 0

    async def models(self) -> list[str]:
        return [MODEL]

    async def ping(self) -> None:
        self.pings += 1

    async def load(self, model: str) -> StoredModel:
        raise StoreUnavailable("a test")


async def test_store_that_answers_only_pings_is_polled_with_pauses() -> None:
    router = Router(store := Halfway(), random=Random(1))
    router.start()
    await settle(5_000)
    assert 1 <= store.pings < 100
    await router.close()
