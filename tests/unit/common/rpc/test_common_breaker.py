"""Breakers, budgets, latency quantiles, least load and the concurrency limiter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from random import Random

from services.common.base.errors import ErrorKind
from services.common.rpc.breaker import COOL_DOWN_S, FAILURES_TO_OPEN, Breaker, LatencyQuantile, RetryBudget
from services.common.rpc.concurrency_limiter import ConcurrencyLimiter
from services.common.rpc.replicas import idlest
from tests.support.fakes.clock import Clock
from tests.support.oracles.errors import raises_error


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(Clock(0.0))
    for _ in range(3):
        assert [breaker.failed() for _ in range(FAILURES_TO_OPEN - 1)] == [False] * (FAILURES_TO_OPEN - 1)
        breaker.succeeded()
    assert breaker.closed
    assert [breaker.failed() for _ in range(FAILURES_TO_OPEN)][-1], "the one that opened it"
    assert not breaker.closed
    assert not breaker.passable


def test_one_trial_at_a_time_after_the_pause() -> None:
    clock = Clock(0.0)
    breaker = Breaker(clock)
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed()
    clock.now = breaker.retry_after_s
    assert breaker.passable
    breaker.try_pass()
    assert not breaker.passable, "the trial is under way"
    breaker.succeeded()
    assert breaker.passable
    assert breaker.retry_after_s == 0


def test_pauses_grow_up_to_a_bound_and_start_small_again() -> None:
    clock = Clock(0.0)
    breaker = Breaker(clock)
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed()
    pauses = [breaker.retry_after_s]
    for _ in range(8):
        clock.now += breaker.retry_after_s
        breaker.try_pass()
        assert not breaker.failed(), "it was open before"
        pauses.append(breaker.retry_after_s)
    assert pauses[0] <= COOL_DOWN_S[0] * 1.2
    assert COOL_DOWN_S[1] * 0.8 <= pauses[-1] <= COOL_DOWN_S[1] * 1.2
    breaker.succeeded()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed()
    assert breaker.retry_after_s <= COOL_DOWN_S[0] * 1.2


def test_a_budget_is_a_share_of_the_calls() -> None:
    budget = RetryBudget(0.1, 5)
    assert [budget.spend() for _ in range(6)] == [True] * 5 + [False]
    spent = 0
    for _ in range(1000):
        budget.earn()
        spent += budget.spend()
    assert 90 <= spent <= 100


def test_the_usual_time_is_longer_than_most_answers_and_follows_them() -> None:
    random = Random(1)
    usual = LatencyQuantile(0.0001, 0.5)
    for scale in (0.01, 0.2):
        for _ in range(3000):
            usual.saw(random.uniform(0, scale))
        slower = sum(random.uniform(0, scale) > usual.seconds for _ in range(2000))
        assert slower < 300, "of 2000, far fewer than half are slower"
        assert usual.seconds < scale * 1.5


def test_the_usual_time_has_a_floor() -> None:
    usual = LatencyQuantile(0.02, 0.5)
    for _ in range(5000):
        usual.saw(0.0001)
    assert usual.seconds == 0.02


def test_a_peer_that_hangs_is_left_alone_for_the_longest_pause_until_it_answers() -> None:
    now = 0.0
    breaker = Breaker(lambda: now)
    breaker.trip()
    assert breaker.tripped
    assert not breaker.passable
    now = COOL_DOWN_S[1]
    assert breaker.passable
    breaker.try_pass()
    assert not breaker.passable, "one trial"
    breaker.succeeded()
    assert breaker.passable
    assert not breaker.tripped


def test_equals_are_chosen_alike_and_the_idlest_always() -> None:
    load = {"a": 0, "b": 0, "c": 0}
    assert idlest([], load.__getitem__) is None
    assert idlest(["b"], load.__getitem__) == "b"
    assert {idlest(load, load.__getitem__) for _ in range(200)} == {"a", "b", "c"}
    load["a"] = load["c"] = 1
    assert {idlest(load, load.__getitem__) for _ in range(50)} == {"b"}


@asynccontextmanager
async def turn(limiter: ConcurrencyLimiter, most_s: float = inf) -> AsyncIterator[None]:
    await limiter.enter(most_s)
    try:
        yield
    finally:
        limiter.leave()


async def test_few_at_a_time_and_in_order() -> None:
    turnstile, through, most, order = ConcurrencyLimiter("x", at_once=3), 0, 0, list[int]()

    async def call(number: int) -> None:
        nonlocal through, most
        async with turn(turnstile):
            through += 1
            most = max(most, through)
            order.append(number)
            await asyncio.sleep(0)
            through -= 1

    await asyncio.gather(*(call(number) for number in range(50)))
    assert (most, through) == (3, 0)
    assert order == list(range(50))


async def test_a_turn_that_does_not_come_is_a_typed_refusal() -> None:
    turnstile = ConcurrencyLimiter("x", at_once=1, longest_s=0.01)
    async with turn(turnstile):
        for most_s in (5.0, 0.001):
            with raises_error(kind=ErrorKind.OVERLOADED) as refused:
                async with turn(turnstile, most_s):
                    raise AssertionError("there is no turn")
            assert refused.value.retry_after_ms > 0
    async with turn(turnstile):
        pass


async def test_cancelled_or_failed_turn_is_released() -> None:
    turnstile = ConcurrencyLimiter("x", at_once=1)

    async def wait() -> None:
        async with turn(turnstile):
            raise ValueError

    async with turn(turnstile):
        waiting = [asyncio.create_task(wait()) for _ in range(5)]
        await asyncio.sleep(0)
        for task in waiting[::2]:
            task.cancel()
        await asyncio.sleep(0)
    heard = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(one) for one in heard].count(ValueError) == 2
    async with asyncio.timeout(30), turn(turnstile):
        pass
