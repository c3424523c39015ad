"""Waits for the event loop, or for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def settle(rounds: int = 20) -> None:
    """Lets every task run that is ready, and those that it wakes."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
