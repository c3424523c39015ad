"""Large bodies take turns, and at most their share of the event loop's time."""

from __future__ import annotations

import asyncio
from time import monotonic, thread_time

import pytest

from services.common.errors import ErrorKind, SluiceError
from services.gateway.http.body_pace import BodyPace


def work(seconds: float) -> None:
    """Keeps this thread busy without a pause."""
    end = thread_time() + seconds
    while thread_time() < end:
        pass


async def test_first_large_body_does_not_wait() -> None:
    pace = BodyPace(0.01)
    await asyncio.wait_for(pace.turn(0.001), 20)


async def test_large_bodies_beside_each_other_take_at_most_their_share_of_the_time() -> None:
    pace, spent = BodyPace(0.25), 0.02

    async def body() -> None:
        await pace.turn(60)
        work(spent)

    began = monotonic()
    await asyncio.gather(*(body() for _ in range(6)))
    assert monotonic() - began >= 5 * spent * 4


async def test_large_bodies_have_their_turns_in_the_order_of_arrival() -> None:
    pace, order = BodyPace(0.5), list[int]()

    async def body(number: int) -> None:
        await pace.turn(60)
        order.append(number)
        work(0.002)

    await asyncio.gather(*(body(number) for number in range(8)))
    assert order == list(range(8))


async def test_large_body_whose_turn_does_not_come_is_refused_and_the_next_one_is_not() -> None:
    pace = BodyPace(0.01)
    await pace.turn(60)
    work(0.01)
    with pytest.raises(SluiceError, match="--large-body-share") as caught:
        await pace.turn(0.01)
    assert (caught.value.kind, caught.value.retry_after_ms) == (ErrorKind.UNAVAILABLE, 1000)
    await asyncio.wait_for(pace.turn(60), 60)
