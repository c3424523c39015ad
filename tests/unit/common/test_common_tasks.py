"""Background tasks: none dies unseen, none outlives its owner."""

from __future__ import annotations

import asyncio

import pytest

from services.common.base.tasks import Stop, TaskOwner


async def forever() -> None:
    await asyncio.Event().wait()


async def die() -> None:
    raise ValueError("loop is broken")


async def test_death_is_logged_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    deaths: list[tuple[str, str]] = []
    owner = TaskOwner(on_death=lambda name, error: deaths.append((name, str(error))))
    task = owner.spawn(die(), "heartbeat")
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert deaths == [("heartbeat", "loop is broken")]
    assert "heartbeat" in caplog.text
    assert owner.alive == 0


async def test_death_stops_the_process_as_failed() -> None:
    stop = Stop()
    owner = TaskOwner(on_death=stop.fail)
    owner.spawn(die(), "heartbeat")
    async with asyncio.timeout(30):
        await stop.wait()
    assert stop.failed
    await owner.close()


async def test_ending_and_cancelling_are_no_deaths() -> None:
    stop = Stop()
    owner = TaskOwner(on_death=stop.fail)
    owner.spawn(asyncio.sleep(0), "short")
    long = owner.spawn(forever(), "long")
    long.cancel()
    await asyncio.wait([long])
    await asyncio.sleep(0)
    assert not stop.is_set()
    assert owner.alive == 0


async def test_close_ends_what_runs_and_waits_for_it() -> None:
    cleaned = []

    async def careful() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    owner = TaskOwner()
    task = owner.spawn(careful(), "careful")
    await asyncio.sleep(0)
    assert owner.alive == 1
    await owner.close()
    assert task.cancelled()
    assert cleaned == [True]
    assert owner.alive == 0


async def test_failure_while_closing_is_not_a_death() -> None:
    async def clumsy() -> None:
        try:
            await forever()
        finally:
            raise ValueError("while cleaning up")

    stop = Stop()
    owner = TaskOwner(on_death=stop.fail)
    owner.spawn(clumsy(), "clumsy")
    await asyncio.sleep(0)
    await owner.close()
    assert not stop.is_set()


async def test_close_from_an_owned_task_returns() -> None:
    owner = TaskOwner()
    closed = asyncio.Event()

    async def closer() -> None:
        owner.spawn(forever(), "other")
        try:
            await owner.close()
        finally:
            closed.set()

    owner.spawn(closer(), "closer")
    async with asyncio.timeout(30):
        await closed.wait()


async def test_lost_cancellation_is_repeated() -> None:
    heard = 0

    async def loses_the_first() -> None:
        nonlocal heard
        while heard < 2:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                heard += 1

    owner = TaskOwner()
    owner.spawn(loses_the_first(), "stubborn")
    await asyncio.sleep(0)
    await asyncio.wait_for(owner.close(), 10)
    assert heard == 2
    assert owner.alive == 0
