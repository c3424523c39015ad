"""The line: bounded, with a deadline, fair between keys and ordered by priority."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.gateway.admission.fair_queue import FairQueue
from services.gateway.admission.keys import ApiKey
from tests.support.oracles.errors import raises_error
from tests.support.waiting import settle


def key(name: str, priority: int = 0, weight: int = 1) -> ApiKey:
    return ApiKey(name, name, "", priority=priority, weight=weight)


A, B = key("a"), key("b")


class Crowd:
    """Requests in front of a line; who came in, in order."""

    def __init__(self, line: FairQueue) -> None:
        self.line = line
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, who: ApiKey, number: int = 1, cost: float = 1.0) -> None:
        for _ in range(number):
            self.tasks.append(asyncio.create_task(self._one(who, cost)))
        await settle()

    async def _one(self, who: ApiKey, cost: float) -> None:
        await self.line.enter(who, cost)
        self.order.append(who.id)

    async def leave(self, number: int) -> None:
        for _ in range(number):
            self.line.leave()
            await settle()

    async def refused(self) -> int:
        await settle()
        errors = [task.exception() for task in self.tasks if task.done()]
        return sum(isinstance(error, SluiceError) for error in errors)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_a_key_that_floods_does_not_delay_the_others() -> None:
    crowd = Crowd(FairQueue(1, 100, 60))
    await crowd.come(A, 20)
    await crowd.come(B, 3)
    await crowd.leave(6)
    assert crowd.order.count("b") == 3
    await crowd.close()


@pytest.mark.parametrize(
    ("weight", "cost", "ratio"),
    [pytest.param(3, 1.0, 3, id="weight"), pytest.param(1, 0.25, 4, id="short prompts")],
)
async def test_turns_of_two_keys_are_shared_by_weight_and_cost(weight: int, cost: float, ratio: float) -> None:
    crowd = Crowd(FairQueue(1, 200, 60))
    await crowd.come(key("more", weight=weight), 60, cost=cost)
    await crowd.come(key("less"), 60)
    await crowd.leave(40)
    turns = Counter(crowd.order[1:])
    assert ratio - 1 < turns["more"] / turns["less"] < ratio + 1
    await crowd.close()


async def test_higher_priorities_go_first() -> None:
    crowd = Crowd(FairQueue(1, 100, 60))
    await crowd.come(A, 3)
    await crowd.come(key("urgent", priority=5), 2)
    await crowd.leave(4)
    assert crowd.order == ["a", "urgent", "urgent", "a", "a"]
    await crowd.close()


async def test_a_full_line_refuses_with_a_time_to_come_back() -> None:
    line = FairQueue(1, 2, 60)
    crowd = Crowd(line)
    await crowd.come(A, 3)
    with raises_error(kind=ErrorKind.OVERLOADED, code="overloaded") as refused:
        await line.enter(A)
    assert refused.value.retry_after_ms >= 1000
    await crowd.close()


async def test_full_queue_drops_the_last_request_of_the_largest_key() -> None:
    crowd = Crowd(FairQueue(1, 4, 60))
    await crowd.come(A, 5)
    await crowd.come(B, 2)
    assert await crowd.refused() == 2
    await crowd.leave(4)
    assert Counter(crowd.order) == {"a": 3, "b": 2}
    await crowd.close()


async def test_a_full_line_makes_room_for_a_higher_priority() -> None:
    crowd = Crowd(FairQueue(1, 2, 60))
    await crowd.come(A, 3)
    await crowd.come(key("urgent", priority=1), 2)
    assert await crowd.refused() == 2
    await crowd.come(A, 1)
    assert await crowd.refused() == 3, "but not the other way round"
    await crowd.close()


async def test_waiting_ends_at_its_deadline() -> None:
    line = FairQueue(1, 10, 60)
    await line.enter(A)
    with pytest.raises(SluiceError, match=r"waited 0\.01 s in the queue"):
        await line.enter(A, timeout_s=0.01)
    assert (line.running, line.waiting) == (1, 0)
    line.leave()
    assert line.try_enter()


async def test_cancelled_wait_leaves_the_queue_consistent() -> None:
    line = FairQueue(1, 10, 60)
    await line.enter(A)
    waiting = [asyncio.create_task(line.enter(who)) for who in (A, B, A)]
    await settle()
    waiting[1].cancel()
    line.leave()
    waiting[0].cancel()  # in the very moment of its turn
    await asyncio.gather(*waiting[:2], return_exceptions=True)
    await waiting[2]
    assert (line.running, line.waiting) == (1, 0)


async def test_the_one_that_is_dropped_may_have_given_up_already() -> None:
    line = FairQueue(1, 2, 60)
    await line.enter(A)
    waiting = [asyncio.create_task(line.enter(A)) for _ in range(2)]
    await settle()
    coming = asyncio.create_task(line.enter(B))
    waiting[1].cancel()  # it has not heard of that yet when the next one comes
    await settle()
    assert not coming.done(), coming.exception()
    assert (line.running, line.waiting) == (1, 2)
    line.leave()
    await settle()
    line.leave()
    await asyncio.gather(waiting[0], coming)
    assert (line.running, line.waiting) == (1, 0)


STEPS = st.lists(st.tuples(st.sampled_from(["come", "leave", "give up"]), st.integers(0, 3)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(1, 3), st.integers(0, 4))
async def test_no_place_is_lost_or_given_twice(steps: list[tuple[str, int]], places: int, room: int) -> None:
    line = FairQueue(places, room, 60)
    who = [key("a"), key("b", weight=2), key("c", priority=1), key("d")]
    tasks: list[asyncio.Task[None]] = []
    inside = 0
    for step, index in steps:
        if step == "come":
            tasks.append(asyncio.create_task(line.enter(who[index], float(index + 1))))
        elif step == "give up" and tasks:
            tasks[index % len(tasks)].cancel()
        elif step == "leave" and inside:
            line.leave()
        await settle()
        ended = [task for task in tasks if task.done()]
        entered = sum(not task.cancelled() and task.exception() is None for task in ended)
        tasks = [task for task in tasks if not task.done()]
        inside += entered - (step == "leave" and inside > 0)
        assert line.running == inside <= places
        assert line.waiting == len(tasks) <= room
        assert not (line.waiting and inside < places), "a request waits in front of a free place"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert line.waiting == 0
