"""Shares the event loop between the slices of all WebSockets and everything else.

A slice takes up to a millisecond, and hundreds of sockets may have one at the same time. They run first come, first
served: those of a turn of the event loop take `TURN_S` together, and the others wait for their share of the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import thread_time

log = logging.getLogger(__name__)

TURN_S = 0.002
"""Work in one turn of the event loop, apart from the rest of the slice that exceeds it."""
SHARE = 0.25


class WaitingSlice:
    """A slice that waits for its turn; `cancel` drops it."""

    __slots__ = ("_run",)

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def cancel(self) -> None:
        """Drops the slice."""
        self._run = None

    def run(self) -> None:
        """Runs the slice unless it was dropped."""
        if self._run is not None:
            self._run()


class SocketPace:
    """The turns of the slices of all sockets of a server.

    Args:
        share: maximum share of the event loop's time while slices wait, between 0 and 1.
        clock: returns the seconds that this thread has worked.
    """

    def __init__(self, share: float = SHARE, clock: Callable[[], float] = thread_time) -> None:
        self._pause_ratio = 1 / share - 1  # seconds of pause for each second of work
        self._clock = clock
        self._waiting: deque[WaitingSlice] = deque()
        self._scheduled = False

    def add(self, run: Callable[[], None]) -> WaitingSlice:
        """Runs a slice in one of the next turns of the event loop."""
        waiting = WaitingSlice(run)
        self._waiting.append(waiting)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)
        return waiting

    def _run(self) -> None:
        started, worked = self._clock(), 0.0
        for _ in range(len(self._waiting)):  # not those that these slices add
            try:
                self._waiting.popleft().run()
            except Exception:  # a bug in this process: the other sockets go on
                log.exception("failed to parse a slice of a WebSocket")
            if (worked := self._clock() - started) >= TURN_S:
                asyncio.get_running_loop().call_later(worked * self._pause_ratio, self._resume)
                return
        self._resume()

    def _resume(self) -> None:
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._run)
