"""Shared limits whose answers get lost: what a request held there does not stand in the way of the key's next ones."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from services.gateway.admission import fallback_limiter as steady_limits
from services.gateway.admission.fallback_limiter import LOCAL, FallbackLimiter
from services.gateway.admission.keys import ApiKey
from services.gateway.admission.limits import LimitDecision, LimitsUnavailable
from services.gateway.admission.local_limiter import LocalLimiter
from services.gateway.admission.redis_limiter import RedisLimiter

KEY = replace(ApiKey("0" * 12, "k", ""), concurrency=1, tokens_per_minute=1000)


class Flaky(LocalLimiter):
    """Shared limits; while `lost` names a step, that step is taken and nobody hears of it."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = ""
        self.away = False
        self.settled: list[str] = []

    def _answer(self, step: str) -> None:
        if step == self.lost:
            raise LimitsUnavailable("timeout")

    def _reached(self) -> None:
        if self.away:
            raise LimitsUnavailable("away")

    async def enter(self, key: ApiKey, request_id: str) -> LimitDecision:
        self._reached()
        decision = await super().enter(key, request_id)
        self._answer("enter")
        return decision

    async def charge(self, key: ApiKey, request_id: str, tokens: int) -> LimitDecision:
        self._reached()
        decision = await super().charge(key, request_id, tokens)
        self._answer("charge")
        return decision

    async def settle(self, key: ApiKey, request_id: str, give_back: int) -> None:
        self._reached()
        self.settled.append(request_id)
        await super().settle(key, request_id, give_back)
        self._answer("settle")


def made() -> tuple[FallbackLimiter, Flaky]:
    shared = Flaky()
    return FallbackLimiter(cast(RedisLimiter, shared)), shared


async def ask(steady: FallbackLimiter, name: str) -> bool:
    """One request after the other; whether it was let in."""
    if (await steady.enter(KEY, name)).refused_by is not None:
        return False
    await steady.charge(KEY, name, 10)
    await steady.settle(KEY, name, 5)
    return True


@pytest.mark.parametrize("lost", ["enter", "charge", "settle"])
async def test_one_answer_that_is_lost_costs_the_next_request_nothing(lost: str) -> None:
    steady, shared = made()
    shared.lost = lost
    assert await ask(steady, "a")
    assert steady.degraded == LOCAL
    shared.lost = ""
    assert [await ask(steady, name) for name in "bcd"] == [True] * 3
    assert steady.degraded == ""
    assert shared.live(KEY) == 0


async def test_a_request_that_ends_while_the_limits_are_away_gives_its_place_up_later() -> None:
    steady, shared = made()
    await steady.enter(KEY, "a")
    shared.away = True
    await steady.charge(KEY, "a", 10)
    await steady.settle(KEY, "a", 5)
    assert await ask(steady, "b"), "counted here"
    shared.away = False
    assert await ask(steady, "c")
    assert shared.live(KEY) == 0


async def test_places_that_are_gone_by_time_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    steady, shared = made()
    monkeypatch.setattr(steady_limits, "LEASE_S", 0.0)
    shared.lost = "charge"
    await steady.enter(KEY, "a")
    await steady.charge(KEY, "a", 10)
    shared.lost = ""
    await steady.enter(KEY, "b")
    assert shared.settled == []
