"""Breakers, budgets and the usual time of an answer."""

from __future__ import annotations

from random import Random

from services.common.rpc.breaker import COOL_DOWN_S, FAILURES_TO_OPEN, Breaker, LatencyQuantile, RetryBudget


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(Clock())
    for _ in range(3):
        assert [breaker.failed() for _ in range(FAILURES_TO_OPEN - 1)] == [False] * (FAILURES_TO_OPEN - 1)
        breaker.succeeded()
    assert breaker.closed
    assert [breaker.failed() for _ in range(FAILURES_TO_OPEN)][-1], "the one that opened it"
    assert not breaker.closed
    assert not breaker.passable


def test_one_trial_at_a_time_after_the_pause() -> None:
    clock = Clock()
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
    clock = Clock()
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
