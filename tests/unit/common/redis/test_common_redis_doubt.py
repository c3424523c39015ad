"""After a failure the masters are asked for again and again: one that ended may be back before another is elected."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from redis.exceptions import ConnectionError as ConnectionLost

from services.common.redis import servers as redis_servers
from services.common.redis.connect import Address
from services.common.redis.masters import Masters
from services.common.redis.servers import RedisServers
from services.common.redis.target import parse
from tests.support.waiting import until

OLD, NEW = ("127.0.0.1", 1), ("127.0.0.1", 2)


class MovingMasters(Masters):
    """Sentinels that name the old master, which is back, until another one is elected."""

    def __init__(self) -> None:
        self.elected = OLD
        self.searches = 0
        self.failures = 0
        self._found: Address | None = OLD

    def address(self, key: str) -> Address | None:
        return self._found

    @property
    def addresses(self) -> Iterable[Address]:
        return () if self._found is None else (self._found,)

    async def find(self) -> None:
        self.searches += 1
        if self.searches <= self.failures:
            raise ConnectionLost("no answer in time")
        self._found = self.elected

    def forget(self) -> None:
        """Knows no master any more."""
        self._found = None

    def redirect(self, slot: int, address: Address) -> None:
        raise AssertionError("there are no slots")


@pytest.fixture
async def servers(monkeypatch: pytest.MonkeyPatch) -> tuple[RedisServers, MovingMasters]:
    masters = MovingMasters()
    monkeypatch.setattr(redis_servers, "masters_of", lambda target, timeout_s: masters)
    monkeypatch.setattr(redis_servers, "PAUSE_S", 0.0)
    monkeypatch.setattr(redis_servers, "DOUBTED_REFRESH_S", 0.01)
    return RedisServers(parse("redis+sentinel://127.0.0.1:1/master"), 1.0), masters


async def test_master_elected_after_the_old_one_is_back_is_found(servers: tuple[RedisServers, MovingMasters]) -> None:
    known, masters = servers
    await known.search()
    known.report(ConnectionLost("closed"), OLD, known.epoch(OLD))
    await until(lambda: masters.searches == 2)  # which finds the old one, back and empty
    assert known.known("k") == OLD
    masters.elected = NEW
    await until(lambda: known.known("k") == NEW)
    await known.close()


@pytest.mark.parametrize("failures", [1, 2])
async def test_first_call_searches_once_more_if_no_server_answers_in_time(
    servers: tuple[RedisServers, MovingMasters], failures: int
) -> None:
    known, masters = servers
    masters.forget()
    masters.failures = failures
    try:
        assert await known.address("k") == OLD
    except ConnectionLost:
        assert failures == 2
    assert masters.searches == 2
    await known.close()


async def test_masters_without_a_failure_are_not_asked_for_again(servers: tuple[RedisServers, MovingMasters]) -> None:
    known, masters = servers
    await known.search()
    for _ in range(5):
        await asyncio.sleep(0.02)
        assert known.known("k") == OLD
    assert masters.searches == 1
    await known.close()
