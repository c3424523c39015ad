"""Spaces out the parsing of large bodies, to leave the event loop to everything else.

A body of several megabytes takes tens of milliseconds to count, parse, validate and translate. Each large body waits
for its turn, is parsed in slices with other work of the loop between them, and the next turn starts after a pause in
proportion to the time that the last one took. Isolated large bodies do not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import thread_time

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError

LARGE_BYTES = 64 << 10
"""Longer bodies wait for their turn; shorter ones take a millisecond at most."""
SHARE = 0.25
"""Share of the event loop's time for consecutive large bodies."""
UNPACED_S = 0.01
"""Work of one body after which its slices are spaced out, too; seconds."""


class BodyPace:
    """Schedules the turns of large bodies, first come, first served.

    Args:
        share: maximum share of the event loop's time for consecutive large bodies, between 0 and 1.
        max_waiting: maximum number of bodies that wait for their turn; None where their memory is bounded by other
            means.
    """

    def __init__(self, share: float = SHARE, max_waiting: int | None = None) -> None:
        self._pause_ratio = 1 / share - 1  # seconds of pause for each second of work
        self._turns = asyncio.Lock()
        self._next_at = 0.0
        self._refused = Budget("body_time", 0, "")
        self._max_waiting = max_waiting
        self._waiting = 0

    async def turn(self, timeout_s: float, slices: Iterable[None] = ()) -> None:
        """Waits until a large body may be parsed, runs `slices`, and measures the caller's work until it suspends.

        Args:
            timeout_s: longest wait for the turn.
            slices: work of the turn, with a pause for the event loop after each.

        Raises:
            SluiceError: UNAVAILABLE if the turn does not come in time or too many bodies wait; whatever the slices
                raise.
        """
        loop = asyncio.get_running_loop()
        await self._wait(loop, timeout_s)
        worked, started = 0.0, thread_time()
        try:
            for _ in slices:
                taken_s = thread_time() - started
                worked += taken_s
                await asyncio.sleep(taken_s * self._pause_ratio if worked > UNPACED_S else 0)
                started = thread_time()
        finally:
            # Runs when the caller first suspends; the next turn starts only then.
            loop.call_soon(self._end, started - worked)

    def _end(self, started: float) -> None:
        self._next_at = asyncio.get_running_loop().time() + (thread_time() - started) * self._pause_ratio
        self._turns.release()

    async def _wait(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        """Acquires the turn."""
        if self._max_waiting is not None and self._waiting >= self._max_waiting:
            raise self._refuse(f"{self._waiting} others wait to be parsed")
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._turns.acquire()
                try:
                    if (pause := self._next_at - loop.time()) > 0:
                        await asyncio.sleep(pause)
                except BaseException:
                    self._turns.release()
                    raise
        except TimeoutError:
            raise self._refuse(f"this one waited {timeout_s:g} s to be parsed") from None
        finally:
            self._waiting -= 1

    def _refuse(self, reason: str) -> SluiceError:
        return self._refused.refuse(
            f"Too many large request bodies arrived at once; {reason}",
            kind=ErrorKind.UNAVAILABLE,
            retry_after_ms=1000,
        )
