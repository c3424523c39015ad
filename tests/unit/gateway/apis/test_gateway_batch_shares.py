"""Shares of slots and memory between the batches of tenants, and files that grow."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.apis.batches.pieces import JOINED_BYTES, Pieces
from services.gateway.apis.batches.shares import FairShares
from tests.support.waiting import settle


async def test_first_share_of_a_tenant_is_there_at_once_and_more_only_within_the_limit() -> None:
    shares = FairShares(3)
    async with AsyncExitStack() as held:
        for _ in range(3):
            await held.enter_async_context(shares.taken("a"))
        await held.enter_async_context(shares.taken("b"))
        assert shares.used == 4
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), shares.taken("b"):
                raise AssertionError("a second share beyond the limit")
        await held.enter_async_context(shares.taken("c"))
    assert shares.used == 0


async def test_share_that_is_given_back_goes_to_the_tenant_that_holds_least() -> None:
    shares, order = FairShares(4), list[str]()
    a, b = AsyncExitStack(), AsyncExitStack()
    for _ in range(3):
        await a.enter_async_context(shares.taken("a"))
    await b.enter_async_context(shares.taken("b"))

    async def take(owner: str) -> None:
        async with shares.taken(owner):
            order.append(owner)
            await asyncio.sleep(60)

    waiting = [asyncio.create_task(take(owner)) for owner in ("a", "a", "b", "b")]
    await settle()
    assert order == []
    await a.aclose()
    await settle()
    assert order == ["b", "a", "a"], "each time the tenant that holds least"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await b.aclose()
    assert shares.used == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.booleans()), max_size=30))
async def test_shares_of_random_tenants_exceed_the_limit_by_one_each_at_most(
    takers: list[tuple[str, int, bool]],
) -> None:
    shares, limit = FairShares(8), 8
    firsts = sum(max((amount for name, amount, _ in takers if name == owner), default=0) for owner in "abc")

    async def take(owner: str, amount: int) -> None:
        async with shares.taken(owner, amount):
            assert amount <= shares.used <= limit + firsts
            await settle(2)

    tasks = [asyncio.create_task(take(owner, amount)) for owner, amount, _ in takers]
    await settle(1)
    for task, (_, _, cancelled) in zip(tasks, takers, strict=True):
        if cancelled:
            task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [each for each in found if each is not None and not isinstance(each, asyncio.CancelledError)] == []
    assert shares.used == 0


@given(
    st.lists(st.one_of(st.binary(max_size=9), st.just(b"x" * JOINED_BYTES)), max_size=12),
    st.integers(0, 3 * JOINED_BYTES),
    st.integers(0, 2 * JOINED_BYTES),
)
def test_file_that_grows_is_read_like_its_bytes(parts: list[bytes], start: int, size: int) -> None:
    pieces, data = Pieces(), b"".join(parts)
    for part in parts:
        pieces.append(part)
    assert len(pieces) == len(data)
    assert pieces.read(start, size) == data[start : start + size]
