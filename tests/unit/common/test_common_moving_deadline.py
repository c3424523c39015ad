"""A deadline that is moved: it passes at the moment set last, and many need one timer."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from services.common.base.moving_deadline import MovingDeadline
from tests.support.waiting import until


class Owner:
    def __init__(self) -> None:
        self.passed: list[float] = []
        self.deadline = MovingDeadline(self.on_passed)

    def on_passed(self) -> None:
        self.passed.append(asyncio.get_running_loop().time())


@pytest.mark.parametrize(("first_s", "last_s"), [(0.1, 1.0), (60.0, 1.0)], ids=["later", "earlier"])
async def test_a_moved_deadline_passes_once_at_the_last_moment(first_s: float, last_s: float) -> None:
    owner, start = Owner(), asyncio.get_running_loop().time()
    owner.deadline.move(start + first_s)
    owner.deadline.move(start + last_s)
    await until(lambda: owner.passed, timeout_s=30)
    assert len(owner.passed) == 1
    assert start + last_s <= owner.passed[0] + 0.01


async def test_many_deadlines_need_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, loop, timers = Owner(), asyncio.get_running_loop(), []
    call_at = loop.call_at

    def counted(when: float, callback: Callable[..., Any], *arguments: Any) -> asyncio.TimerHandle:
        timers.append(when)
        return call_at(when, callback, *arguments)

    monkeypatch.setattr(loop, "call_at", counted)
    for number in range(100):
        owner.deadline.move(loop.time() + 60 + number)
    assert len(timers) == 1
    owner.deadline.close()


async def test_closed_deadline_never_passes_and_lets_its_owner_go() -> None:
    owner = Owner()
    passed = owner.passed
    owner.deadline.move(asyncio.get_running_loop().time() + 0.05)
    owner.deadline.close()
    gone = weakref.ref(owner)
    del owner
    assert gone() is None, "no cycle is left"
    await asyncio.sleep(0.2)
    assert not passed
