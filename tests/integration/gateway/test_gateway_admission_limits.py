"""Limits of keys: the same rules alone and shared over a real Redis, and what happens when Redis goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.gateway.admission.fallback_limiter import LOCAL, FallbackLimiter
from services.gateway.admission.keys import ApiKey
from services.gateway.admission.limits import Limit, Limiter, LimitsUnavailable
from services.gateway.admission.local_limiter import LocalLimiter
from services.gateway.admission.redis_limiter import RedisLimiter
from tests.support.servers.redis_server import RedisServer

KEY = ApiKey("0" * 12, "k", "")
PATIENT_S = 20.0  # of a machine that is busy with other tests


@pytest.fixture(params=["memory", "redis", "steady"])
async def limiter(
    request: pytest.FixtureRequest, shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Limiter]:
    prefix = tmp_path_factory.mktemp("prefix").name
    made: Limiter
    if request.param == "memory":
        made = LocalLimiter()
    else:
        made = RedisLimiter(shared_redis.url, prefix, PATIENT_S)
        if request.param == "steady":
            made = FallbackLimiter(made)
    yield made
    await made.close()


async def test_requests_a_minute(limiter: Limiter) -> None:
    key = replace(KEY, requests_per_minute=3)
    for left in (2, 1, 0):
        decision = await limiter.enter(key, f"r{left}")
        assert decision.refused_by is None
        assert (decision.requests.limit, decision.requests.remaining) == (3, left)
        assert 0 < decision.requests.reset_s <= 60
    refused = await limiter.enter(key, "r4")
    assert refused.refused_by is Limit.REQUESTS
    assert 10 < refused.retry_after_s <= 20
    assert decision.tokens.limit == 0


async def test_requests_come_back_with_time(limiter: Limiter) -> None:
    key = replace(KEY, requests_per_minute=120)  # one in 500 ms
    entered = [await limiter.enter(key, f"r{number}") for number in range(200)]
    assert any(decision.refused_by for decision in entered)
    async with asyncio.timeout(PATIENT_S):
        while (await limiter.enter(key, "later")).refused_by:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_tokens_are_taken_given_back_and_owed(limiter: Limiter) -> None:
    key = replace(KEY, tokens_per_minute=600)
    for request in ("a", "b", "c"):
        await limiter.enter(key, request)
    taken = await limiter.charge(key, "a", 500)
    assert taken.refused_by is None
    assert 100 <= taken.tokens.remaining < 500
    refused = await limiter.charge(key, "a", 599)
    assert refused.refused_by is Limit.TOKENS
    assert refused.retry_after_s > 0
    await limiter.settle(key, "a", 450)
    assert (await limiter.charge(key, "b", 0)).tokens.remaining >= 550
    await limiter.settle(key, "b", 10_000)
    assert (await limiter.charge(key, "c", 0)).tokens.remaining <= 600, "never more than a minute's worth"
    await limiter.settle(key, "c", -6000)
    owing = await limiter.enter(key, "d")
    assert owing.refused_by is Limit.TOKENS
    assert owing.retry_after_s > 400
    assert owing.tokens.remaining == 0


async def test_concurrency(limiter: Limiter) -> None:
    key = replace(KEY, concurrency=2)
    assert (await limiter.enter(key, "a")).refused_by is None
    assert (await limiter.enter(key, "b")).refused_by is None
    assert (await limiter.enter(key, "c")).refused_by is Limit.CONCURRENCY
    await limiter.settle(key, "a", 0)
    assert (await limiter.enter(key, "c")).refused_by is None
    assert (await limiter.enter(key, "d")).refused_by is Limit.CONCURRENCY


async def test_many_at_once_get_exactly_what_there_is(limiter: Limiter) -> None:
    key = replace(KEY, requests_per_minute=20, concurrency=1000)
    decisions = await asyncio.gather(*(limiter.enter(key, f"r{number}") for number in range(100)))
    assert 20 <= sum(decision.refused_by is None for decision in decisions) <= 22  # some come back meanwhile


async def test_two_gateways_share_one_limit(shared_redis: RedisServer) -> None:
    key = replace(KEY, requests_per_minute=10, concurrency=8)
    gateways = [RedisLimiter(shared_redis.url, "two", PATIENT_S) for _ in range(2)]
    decisions = await asyncio.gather(*(gateways[number % 2].enter(key, f"r{number}") for number in range(30)))
    assert sum(decision.refused_by is None for decision in decisions) == 8
    for gateway in gateways:
        await gateway.close()


async def test_places_of_a_gateway_that_died_come_back(
    shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.admission.redis_limiter.LEASE_S", 3.0)
    key = replace(KEY, concurrency=1)
    shared = RedisLimiter(shared_redis.url, "died", PATIENT_S)
    await shared.enter(key, "a")
    async with asyncio.timeout(PATIENT_S):
        while (await shared.enter(key, "b")).refused_by:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    monkeypatch.setattr("services.gateway.admission.redis_limiter.LEASE_S", 60.0)
    await shared.hold({key.id: ["b", "a"]})
    await asyncio.sleep(3.5)
    assert (await shared.enter(key, "c")).refused_by is Limit.CONCURRENCY, "b was held on"
    await shared.settle(key, "b", 0)
    await shared.hold({key.id: ["b"]})
    assert (await shared.enter(key, "c")).refused_by is None, "what ended is not held on"
    await shared.close()


async def test_redis_goes_away_and_comes_back(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    steady = FallbackLimiter(RedisLimiter(server.url, timeout_s=2))
    key = replace(KEY, requests_per_minute=5, tokens_per_minute=1000)
    try:
        assert (await steady.enter(key, "a")).refused_by is None
        assert steady.degraded == ""
        server.stop()
        assert (await steady.charge(key, "a", 100)).tokens.remaining == 900, "charged here instead"
        assert steady.degraded == LOCAL
        decisions = [await steady.enter(key, f"b{number}") for number in range(8)]
        assert sum(decision.refused_by is None for decision in decisions) in (5, 6), "local limits hold"
        await steady.settle(key, "a", 100)
        await steady.settle(key, "b1", 0)
        server.start()
        async with asyncio.timeout(PATIENT_S):
            while steady.degraded:
                await steady.enter(key, "c")
                await asyncio.sleep(0.05)
    finally:
        await steady.close()
        server.stop()


async def test_a_redis_that_hangs_is_left_alone(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    shared = RedisLimiter(server.url, timeout_s=0.2)
    try:
        server.freeze()
        with pytest.raises(LimitsUnavailable):
            await shared.enter(KEY, "a")
    finally:
        server.thaw()
        await shared.close()
        server.stop()
