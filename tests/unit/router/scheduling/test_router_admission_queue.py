"""Waiting in line: by priority, then by arrival, bounded, and no request is forgotten or served after leaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import suppress
from dataclasses import replace

import pytest

from services.common.base.errors import SluiceError
from services.common.base.tasks import TaskOwner
from services.router.scheduling import admission_queue as line_module
from services.router.scheduling.admission_queue import (
    AdmissionQueues,
    NoWorkers,
    Reason,
    WaitTerms,
    no_workers,
)
from services.router.scheduling.service_rate import LATEST_MS, SOONEST_MS, UNKNOWN_MS, ServiceRate
from services.router.state.reservations.table import NO_DEADLINE, AllBusy, BusyReason, QueueOrder
from tests.support.oracles.circles import circles_of
from tests.support.waiting import settle

M = "m"


class Desk:
    """`free` places; who gets one is written down. `held` says who has one already."""

    def __init__(self) -> None:
        self.free = 0
        self.served: list[str] = []
        self.held: set[str] = set()
        self.asked: list[str] = []
        self.abandoned: list[str] = []
        self.gate: asyncio.Event | None = None

    def attempt(self, name: str) -> Callable[..., object]:
        async def attempt(*, place: bool = True) -> str:
            self.asked.append(name)
            if name in self.held:
                return name
            if not place or not self.free:
                raise AllBusy
            self.free -= 1
            if self.gate is not None:
                await self.gate.wait()
            self.served.append(name)
            return name

        return attempt

    async def abandon(self, name: str) -> None:
        self.abandoned.append(name)
        self.free += 1


@pytest.fixture(autouse=True)
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves here was moved by what is tested, however slow the machine is."""
    monkeypatch.setattr(line_module, "POLL_S", 3600)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
async def queues(desk: Desk) -> AsyncIterator[AdmissionQueues[str]]:
    tasks = TaskOwner()
    yield AdmissionQueues(tasks, 3, desk.abandon)
    await tasks.close()


def come(
    queues: AdmissionQueues[str],
    desk: Desk,
    name: str,
    priority: int = 0,
    wait_ms: int = 60_000,
    scope: Hashable = None,
) -> asyncio.Task[tuple[str, int]]:
    terms = WaitTerms(priority, max_wait_ms=wait_ms, scope=scope)
    return asyncio.create_task(queues.admit(M, desk.attempt(name), lambda: terms))  # type: ignore[arg-type]


async def free(queues: AdmissionQueues[str], desk: Desk, places: int = 1) -> None:
    desk.free += places
    queues.ended(M, places)
    await settle()


async def test_request_with_a_free_worker_does_not_wait(queues: AdmissionQueues[str], desk: Desk) -> None:
    desk.free = 1
    assert await come(queues, desk, "a") == ("a", 0)
    assert queues.length(M) == 0


async def test_request_without_a_wait_is_refused_at_once(queues: AdmissionQueues[str], desk: Desk) -> None:
    with pytest.raises(AllBusy) as refused:
        await come(queues, desk, "a", wait_ms=0)
    assert refused.value.retry_after_ms == UNKNOWN_MS


async def test_priority_then_arrival(queues: AdmissionQueues[str], desk: Desk) -> None:
    tasks = []
    for name, priority in (("late", 5), ("first", 0), ("second", 0)):
        tasks.append(come(queues, desk, name, priority))
        await settle()
    for served in (["first"], ["first", "second"], ["first", "second", "late"]):
        await free(queues, desk)
        assert desk.served == served
    assert [name for name, _ in await asyncio.gather(*tasks)] == ["late", "first", "second"]
    assert queues.length(M) == 0


async def test_several_places_serve_several_in_one_go(queues: AdmissionQueues[str], desk: Desk) -> None:
    tasks = [come(queues, desk, name) for name in "abc"]
    await settle()
    await free(queues, desk, 2)
    assert desk.served == ["a", "b"]
    assert not tasks[2].done()
    await free(queues, desk)
    assert desk.served == ["a", "b", "c"]


async def test_request_without_a_wait_does_not_bypass_the_queue(queues: AdmissionQueues[str], desk: Desk) -> None:
    waiting = come(queues, desk, "a")
    await settle()
    desk.free = 1  # and the queue was not told yet
    passing = come(queues, desk, "b", wait_ms=0)
    with pytest.raises(AllBusy):
        await passing
    assert (await waiting)[0] == "a"
    assert desk.served == ["a"]


async def test_request_of_another_scope_is_not_blocked(queues: AdmissionQueues[str], desk: Desk) -> None:
    async def elsewhere(*, place: bool = True) -> str:
        if not place:
            raise AllBusy
        return "elsewhere"

    waiting = come(queues, desk, "a", scope="x")
    await settle()
    assert (await queues.admit(M, elsewhere, lambda: WaitTerms(scope="y")))[0] == "elsewhere"
    assert not waiting.done()


async def test_of_equal_scope_only_the_first_is_tried(queues: AdmissionQueues[str], desk: Desk) -> None:
    tasks = [come(queues, desk, name) for name in "abc"]
    await settle()
    desk.asked.clear()
    queues.ended(M, 0)
    await settle()
    assert desk.asked == ["a"]
    assert not any(task.done() for task in tasks)


async def test_a_repeated_request_is_answered_although_others_wait(queues: AdmissionQueues[str], desk: Desk) -> None:
    waiting = come(queues, desk, "a")
    await settle()
    desk.held.add("granted")
    assert await come(queues, desk, "granted", wait_ms=0) == ("granted", 0)
    assert not waiting.done()


async def test_full_queue_replaces_the_last_request_by_a_higher_priority(
    queues: AdmissionQueues[str], desk: Desk
) -> None:
    tasks = [come(queues, desk, name) for name in "abc"]
    await settle()
    with pytest.raises(AllBusy):
        await come(queues, desk, "d")
    urgent = come(queues, desk, "urgent", priority=-1)
    with pytest.raises(AllBusy):
        await tasks[2]
    await free(queues, desk)
    assert (await urgent)[0] == "urgent"
    assert queues.length(M) == 2


async def test_waiting_ends_at_its_deadline(queues: AdmissionQueues[str], desk: Desk) -> None:
    with pytest.raises(AllBusy):
        await asyncio.wait_for(come(queues, desk, "a", wait_ms=20), 20)
    assert queues.length(M) == 0


async def test_cancelled_wait_is_not_served(queues: AdmissionQueues[str], desk: Desk) -> None:
    leaver, stayer = come(queues, desk, "a"), come(queues, desk, "b")
    await settle()
    leaver.cancel()
    await settle()
    assert queues.length(M) == 1
    await free(queues, desk)
    assert desk.served == ["b"]
    assert (await stayer)[0] == "b"


async def test_reservation_for_a_caller_that_left_goes_to_the_next(queues: AdmissionQueues[str], desk: Desk) -> None:
    desk.gate = asyncio.Event()
    leaver, stayer = come(queues, desk, "a"), come(queues, desk, "b")
    await settle()
    await free(queues, desk)
    leaver.cancel()
    await settle()
    desk.gate.set()
    assert (await asyncio.wait_for(stayer, 20))[0] == "b"
    assert desk.abandoned == ["a"]


async def test_request_without_a_wait_is_served_after_the_queue_has_emptied(
    queues: AdmissionQueues[str], desk: Desk
) -> None:
    waiting = come(queues, desk, "a")
    await settle()
    asking, gone = asyncio.Event(), asyncio.Event()

    async def attempt(*, place: bool = True) -> str:
        if place:
            return "b"
        asking.set()
        await gone.wait()  # the store takes its time
        raise AllBusy

    passing = asyncio.create_task(queues.admit(M, attempt))
    await asking.wait()
    await free(queues, desk, 5)
    assert (await waiting)[0] == "a"
    assert queues.length(M) == 0
    gone.set()
    assert (await asyncio.wait_for(passing, 20))[0] == "b"


async def test_reservation_for_a_caller_that_leaves_at_the_grant_is_released(
    queues: AdmissionQueues[str], desk: Desk
) -> None:
    async def attempt(*, place: bool = True) -> str:
        if not place or not desk.free:
            raise AllBusy
        asyncio.get_running_loop().call_soon(leaver.cancel)  # before the leaver hears of its place
        return "a"

    leaver = asyncio.create_task(queues.admit(M, attempt, lambda: WaitTerms(max_wait_ms=60_000)))
    await settle()
    await free(queues, desk)
    with pytest.raises(asyncio.CancelledError):
        await leaver
    assert desk.abandoned == ["a"]


async def test_error_of_an_attempt_fails_only_its_request(queues: AdmissionQueues[str], desk: Desk) -> None:
    async def broken(*, place: bool = True) -> str:
        if not place:
            raise AllBusy
        raise ValueError("broken")

    waiting = come(queues, desk, "a", scope="x")
    await settle()
    with pytest.raises(ValueError, match="broken"):
        await queues.admit(M, broken, lambda: WaitTerms(max_wait_ms=1000, scope="y"))
    await free(queues, desk)
    assert (await waiting)[0] == "a"


async def test_waiting_requests_fail_when_the_router_stops(desk: Desk) -> None:
    tasks = TaskOwner()
    queues: AdmissionQueues[str] = AdmissionQueues(tasks, 3, desk.abandon)
    waiting = come(queues, desk, "a")
    await settle()
    await tasks.close()
    with pytest.raises(SluiceError, match="stopping"):
        await asyncio.wait_for(waiting, 20)


async def test_empty_queue_has_no_task(desk: Desk) -> None:
    tasks = TaskOwner()
    queues: AdmissionQueues[str] = AdmissionQueues(tasks, 3, desk.abandon)
    waiting = come(queues, desk, "a")
    await settle()
    assert tasks.alive == 1
    await free(queues, desk)
    await waiting
    await settle()
    assert tasks.alive == 0


def test_retry_after_follows_the_service_rate_and_the_queue() -> None:
    now = 100.0
    pace = ServiceRate(lambda: now)
    pace.ended(1)
    assert pace.wait_ms(0) == UNKNOWN_MS
    now += 2
    pace.ended(4)
    assert (pace.wait_ms(0), pace.wait_ms(9)) == (500, 5_000)
    pace.ended(0)
    assert pace.wait_ms(0) == 500
    assert pace.wait_ms(10**6) == LATEST_MS
    for _ in range(100):
        now += 0.001
        pace.ended(1)
    assert pace.wait_ms(0) == SOONEST_MS


TIMES = 20


async def refuse(*, place: bool = True) -> int:
    raise AllBusy


async def grant_nothing(found: int) -> None:
    pass


async def test_refused_after_a_wait_in_line() -> None:
    tasks = TaskOwner()
    queues: AdmissionQueues[int] = AdmissionQueues(tasks, 100, grant_nothing)

    async def wait() -> None:
        with suppress(AllBusy):
            await queues.admit("m", refuse, lambda: WaitTerms(max_wait_ms=20))

    found = await circles_of(wait, TIMES)
    assert found.total() < TIMES, found
    await tasks.close()


def wait(queues: AdmissionQueues[str], desk: Desk, name: str, terms: WaitTerms) -> asyncio.Task[tuple[str, int]]:
    return asyncio.create_task(queues.admit(M, desk.attempt(name), lambda: terms))  # type: ignore[arg-type]


async def test_equal_priority_with_deadlines_is_served_by_deadline(queues: AdmissionQueues[str], desk: Desk) -> None:
    tasks = []
    for name, due in (("none", NO_DEADLINE), ("late", 2_000), ("early", 1_000)):
        tasks.append(wait(queues, desk, name, WaitTerms(deadline_unix_ms=due, max_wait_ms=60_000)))
        await settle()
    await free(queues, desk, 3)
    await asyncio.gather(*tasks)
    assert desk.served == ["early", "late", "none"]


async def test_equal_deadlines_of_two_callers_take_turns(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "POLL_S", 3600)
    tasks = TaskOwner()
    queues: AdmissionQueues[str] = AdmissionQueues(tasks, 100, desk.abandon)
    waiting = []
    for name in ("a1", "a2", "a3", "a4", "b1", "b2"):
        waiting.append(wait(queues, desk, name, WaitTerms(fairness_id=name[0], max_wait_ms=60_000)))
        await settle()
    await free(queues, desk, 2)
    waiting.append(wait(queues, desk, "c1", WaitTerms(fairness_id="c", max_wait_ms=60_000)))
    await settle()
    await free(queues, desk, 5)
    await asyncio.gather(*waiting)
    assert desk.served == ["a1", "b1", "a2", "b2", "c1", "a3", "a4"]
    await tasks.close()


async def test_waiting_requests_over_the_size_limit_are_rejected(desk: Desk) -> None:
    tasks = TaskOwner()
    queues: AdmissionQueues[str] = AdmissionQueues(tasks, 100, desk.abandon, most_bytes=100)
    first = wait(queues, desk, "a", WaitTerms(size=80, max_wait_ms=60_000))
    await settle()
    with pytest.raises(AllBusy) as refused:
        await wait(queues, desk, "b", WaitTerms(size=30, max_wait_ms=60_000))
    assert refused.value.reason is BusyReason.SATURATED
    await free(queues, desk)
    await first
    desk.free = 1
    assert await wait(queues, desk, "c", WaitTerms(size=90, max_wait_ms=60_000)) == ("c", 0)
    await tasks.close()


async def test_request_that_waited_in_vain_has_the_reason(queues: AdmissionQueues[str], desk: Desk) -> None:
    with pytest.raises(AllBusy) as refused:
        await wait(queues, desk, "a", WaitTerms(max_wait_ms=10))
    assert refused.value.reason is BusyReason.EXPIRED


async def test_model_without_workers_makes_requests_wait_until_it_has_some(desk: Desk) -> None:
    tasks = TaskOwner()
    queues: AdmissionQueues[str] = AdmissionQueues(tasks, 100, desk.abandon)
    up = False
    prepared = []

    def attempt(name: str) -> Callable[..., object]:
        async def try_it(*, place: bool = True) -> str:
            if not up:
                raise no_workers(M)
            return await desk.attempt(name)(place=place)  # type: ignore[misc, no-any-return]

        return try_it

    async def admit(name: str, terms: WaitTerms) -> tuple[str, int]:
        async def prepare() -> None:
            if up:
                prepared.append(name)

        return await queues.admit(M, attempt(name), lambda: terms, prepare)  # type: ignore[arg-type]

    patient = WaitTerms(max_wait_for_workers_ms=60_000, max_wait_ms=60_000)
    waiting = [asyncio.create_task(admit("later", replace(patient, priority=1)))]
    waiting.append(asyncio.create_task(admit("sooner", patient)))
    await settle()
    with pytest.raises(NoWorkers) as refused:
        await admit("impatient", WaitTerms(max_wait_ms=60_000))
    assert refused.value.code == "no_workers"
    assert queues.waiting == {(M, Reason.WORKERS): 2}
    with pytest.raises(NoWorkers):
        await admit("short", WaitTerms(max_wait_for_workers_ms=10))
    up, desk.free = True, 1
    queues.ended(M, 0)
    await settle()
    assert sorted(prepared) == ["later", "sooner"]
    assert desk.served == ["sooner"]
    assert queues.waiting == {(M, Reason.CAPACITY): 1}
    await free(queues, desk)
    await asyncio.gather(*waiting)
    assert desk.served == ["sooner", "later"]
    await tasks.close()


async def test_each_reason_to_wait_has_its_own_limit(desk: Desk) -> None:
    tasks = TaskOwner()
    queues: AdmissionQueues[str] = AdmissionQueues(tasks, 100, desk.abandon)
    up = False

    async def attempt(*, place: bool = True) -> str:
        if not up:
            raise no_workers(M)
        raise AllBusy

    waiting = [
        asyncio.create_task(
            queues.admit(M, attempt, lambda: WaitTerms(max_wait_ms=50, max_wait_for_workers_ms=600_000))
        ),
        asyncio.create_task(
            queues.admit(M, attempt, lambda: WaitTerms(max_wait_ms=600_000, max_wait_for_workers_ms=5_000))
        ),
    ]
    await settle()
    up = True
    queues.ended(M, 0)
    with pytest.raises(AllBusy) as refused:
        await asyncio.wait_for(waiting[0], 20)
    assert refused.value.reason is BusyReason.EXPIRED
    done, _ = await asyncio.wait(waiting[1:], timeout=6)
    assert not done, "it waits for capacity, no longer for workers"
    waiting[1].cancel()
    await asyncio.wait(waiting)
    await tasks.close()


async def test_first_request_of_a_queue_is_announced_and_withdrawn(desk: Desk) -> None:
    announced: list[QueueOrder | None] = []

    async def announce(model: str, order: QueueOrder | None) -> int:
        announced.append(order)
        return 1

    tasks = TaskOwner()
    queues: AdmissionQueues[str] = AdmissionQueues(tasks, 100, desk.abandon, announce=announce)
    waiting = [wait(queues, desk, "a", WaitTerms(3, 5, max_wait_ms=60_000))]
    await settle()
    waiting.append(wait(queues, desk, "b", WaitTerms(2, 7, max_wait_ms=60_000)))
    await settle()
    await free(queues, desk, 2)
    await asyncio.gather(*waiting)
    await settle()
    orders = [each and each._replace(waited_ms=0) for each in announced]
    assert orders[0] == QueueOrder(3, 5)
    assert QueueOrder(2, 7) in orders
    assert announced[-1] is None
    await tasks.close()
