"""While a fail-over ends, one sentinel knows the new master and the others name the old one, which may be back."""

from __future__ import annotations

import asyncio
import time

import pytest
from redis.exceptions import ConnectionError as ConnectionLost

from services.common.redis import masters as redis_masters
from services.common.redis.connect import Address
from services.common.redis.masters import SentinelMasters, _Named
from services.common.redis.target import parse

OLD, NEW = ("127.0.0.1", 1), ("127.0.0.1", 2)
LATE_S = 0.05


class Answers(SentinelMasters):
    """Three sentinels, of which one answers late, and two servers that both say that they are masters."""

    def __init__(self, late_s: float, late: _Named) -> None:
        super().__init__(parse("redis+sentinel://a:1,b:1,c:1/master"), 1.0)
        self._late_s = late_s
        self._late = late

    async def _ask(self, sentinel: Address) -> _Named:
        if sentinel[0] != "c":
            return _Named(0, OLD, ())
        await asyncio.sleep(self._late_s)
        return self._late

    async def _is_master(self, address: Address) -> bool:
        return True


async def test_master_that_only_the_last_sentinel_knows_is_found() -> None:
    answers = Answers(LATE_S, _Named(1, NEW, ()))
    await answers.find()
    assert answers.address("k") == NEW


async def test_late_sentinel_with_an_older_answer_has_no_say() -> None:
    answers = Answers(LATE_S, _Named(-1, NEW, ()))
    await answers.find()
    assert answers.address("k") == OLD


async def test_sentinel_that_does_not_answer_delays_a_search_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_masters, "MINORITY_S", LATE_S)
    answers = Answers(60.0, _Named(1, NEW, ()))
    before = time.monotonic()
    await answers.find()
    assert answers.address("k") == OLD
    assert LATE_S <= time.monotonic() - before < 30


async def test_search_without_an_answer_fails() -> None:
    class Silent(Answers):
        async def _ask(self, sentinel: Address) -> _Named:
            raise ConnectionLost("gone")

    with pytest.raises(ConnectionLost, match="none of 3 servers"):
        await Silent(0.0, _Named(0, OLD, ())).find()
