"""A turnstile: few at a time, first come first served, nobody waits for ever, and nobody who leaves keeps a turn."""

from __future__ import annotations

import asyncio

import pytest

from services.common.errors import ErrorKind, SluiceError
from services.common.rpc.concurrency_limiter import ConcurrencyLimiter


async def test_few_at_a_time_and_in_order() -> None:
    turnstile, through, most, order = ConcurrencyLimiter("x", at_once=3), 0, 0, list[int]()

    async def call(number: int) -> None:
        nonlocal through, most
        async with turnstile.turn():
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
    async with turnstile.turn():
        for most_s in (5.0, 0.001):
            with pytest.raises(SluiceError) as refused:
                async with turnstile.turn(most_s):
                    raise AssertionError("there is no turn")
            assert refused.value.kind is ErrorKind.OVERLOADED
            assert refused.value.retry_after_ms > 0
    async with turnstile.turn():
        pass


async def test_who_leaves_the_line_or_fails_keeps_no_turn() -> None:
    turnstile = ConcurrencyLimiter("x", at_once=1)

    async def wait() -> None:
        async with turnstile.turn():
            raise ValueError

    async with turnstile.turn():
        waiting = [asyncio.create_task(wait()) for _ in range(5)]
        await asyncio.sleep(0)
        for task in waiting[::2]:
            task.cancel()
        await asyncio.sleep(0)
    heard = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(one) for one in heard].count(ValueError) == 2
    async with asyncio.timeout(30), turnstile.turn():
        pass
