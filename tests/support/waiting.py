"""Waits for the event loop, or for a condition."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def settle(rounds: int = 20) -> None:
    """Lets every task run that is ready, and those that it wakes."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object], timeout_s: float = 60.0, pause_s: float = 0.005) -> None:
    """Polls a condition, which may be a coroutine function; TimeoutError when it does not hold in time."""
    async with asyncio.timeout(timeout_s):
        while True:
            answer = condition()
            if await answer if inspect.isawaitable(answer) else answer:
                return
            await asyncio.sleep(pause_s)


def wait_until(condition: Callable[[], T], timeout_s: float = 60.0, pause_s: float = 0.05) -> T:
    """Polls a condition and returns what it returned, once that is true; TimeoutError when it is not in time."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition} did not hold within {timeout_s} s")
        time.sleep(pause_s)
    return answer
