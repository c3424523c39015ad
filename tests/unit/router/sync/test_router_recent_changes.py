"""A fail-over loses what the store acknowledged last; the router repeats it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from services.router.state.reservations.cost import Load, Offer
from services.router.state.reservations.table import Reservation, ReservationParams, ReservedRank
from services.router.state.store.base import StoreUnavailable
from services.router.state.store.memory import MemoryStore
from services.router.state.store.store_health import StoreHealth
from services.router.state.sync import recent_changes
from services.router.state.sync.recent_changes import RECENT_S, RecentChanges
from services.router.state.sync.reservation_manager import ReservationManager
from services.router.state.workers.worker import WorkerRank

MODEL = "m"
A, B = WorkerRank("a", 0), WorkerRank("b", 0)
OFFER = Offer(A, 3, 7, 0, 3_000, 7_000)
TERMS = ReservationParams("r", 600_000)


class MovingStore(MemoryStore):
    """Acknowledges changes that are lost when its replica takes over."""

    may_lose_acknowledged = True

    def __init__(self) -> None:
        super().__init__(random=Random(1))
        self.replica = MemoryStore(random=Random(1))
        self.lost_reply = False

    async def select(self, model: str, offers: Sequence[Offer], terms: ReservationParams) -> ReservedRank:
        choice = await super().select(model, offers, terms)
        if self.lost_reply:
            await self.replica.select(model, offers, terms)
            raise StoreUnavailable("a test")
        return choice

    def fail_over(self) -> None:
        self._models = self.replica._models


async def managers(store: MovingStore, count: int = 1) -> tuple[list[ReservationManager], list[asyncio.Task[None]]]:
    made, tasks = [], []
    for _ in range(count):
        health = StoreHealth(store)
        tasks.append(asyncio.create_task(health.keep(_nothing)))
        await health.wait()
        made.append(ReservationManager(store, health, Random(1)))
    return made, tasks


async def _nothing() -> None:
    pass


async def test_acknowledged_reservation_that_was_not_replicated_is_booked_again() -> None:
    store = MovingStore()
    (manager,), tasks = await managers(store)
    for request_id in ("runs", "computed", "ended"):
        await manager.select(MODEL, [OFFER], replace(TERMS, request_id=request_id), {})
    await manager.mark_prefill_complete(MODEL, ["computed"])
    await manager.free(MODEL, ["ended"])
    store.fail_over()
    await manager.replay()
    assert (await store.pulse(MODEL)).loads == {A: Load(3, 14, 2)}
    await manager.replay()
    assert (await store.pulse(MODEL)).loads == {A: Load(3, 14, 2)}, "repeating it changes nothing"
    for task in tasks:
        task.cancel()


async def test_acknowledged_end_that_was_not_replicated_is_repeated() -> None:
    store = MovingStore()
    (manager,), tasks = await managers(store)
    await manager.select(MODEL, [OFFER], TERMS, {})
    await store.replica.select(MODEL, [OFFER], TERMS)
    await manager.free(MODEL, ["r"])
    store.fail_over()
    await manager.replay()
    assert (await store.pulse(MODEL)).loads == {}
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize("first", [0, 1])
async def test_request_that_another_replica_freed_is_not_booked_again(first: int) -> None:
    store = MovingStore()
    replicas, tasks = await managers(store, 2)
    await replicas[0].select(MODEL, [OFFER], TERMS, {})
    await replicas[1].free(MODEL, ["r"])
    store.fail_over()
    await replicas[first].replay()
    await replicas[1 - first].replay()
    assert (await store.pulse(MODEL)).loads == {}
    for task in tasks:
        task.cancel()


async def test_reservation_whose_reply_was_lost_is_where_the_router_said() -> None:
    store = MovingStore()
    (manager,), tasks = await managers(store)
    store.lost_reply = True
    await asyncio.sleep(0.002)
    _, why = await manager.select(MODEL, [OFFER], TERMS, {})
    assert why
    store.lost_reply = False
    store.fail_over()
    store._models[MODEL].book.free(["r"])
    await store.book(MODEL, Reservation("r", B, 1, 1, 1))  # what the old master chose, and its replica heard of
    await manager.replay()
    assert (await store.pulse(MODEL)).loads == {A: Load(3, 7, 1)}
    for task in tasks:
        task.cancel()


def test_recent_changes_are_bounded_in_time_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    recent = RecentChanges(lambda: now)
    recent.reserved([OFFER], TERMS, ReservedRank(A, 1))
    recent.freed(["x"])
    now += RECENT_S + 1
    assert recent.freed_ids == ["x"], "nothing is forgotten while nothing is acknowledged"
    recent.reserved([OFFER], replace(TERMS, request_id="s"), ReservedRank(A, 1))
    recent.freed(["y"])
    assert [reservation.request_id for reservation in recent.reservations] == ["s"]
    assert recent.freed_ids == ["y"]
    monkeypatch.setattr(recent_changes, "MAX_RECENT", 3)
    for number in range(10):
        recent.reserved([OFFER], replace(TERMS, request_id=str(number)), ReservedRank(A, 1))
    assert [reservation.request_id for reservation in recent.reservations] == ["7", "8", "9"]
    recent.drop_worker("a")
    assert recent.reservations == []
