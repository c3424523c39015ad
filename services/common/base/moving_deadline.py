"""A deadline that is moved often and seldom passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class MovingDeadline:
    """Calls a function when the deadline passes that was set last.

    One timer serves many deadlines: if a later one was set when it fires, it starts again. The function is also called
    when nothing waits any more.

    Args:
        on_passed: must not raise.
    """

    __slots__ = ("_at", "_loop", "_on_passed", "_timer")

    def __init__(self, on_passed: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_passed = on_passed
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def move(self, at: float) -> None:
        """Sets the deadline, by the event loop's clock."""
        if self._timer is not None and at < self._at:
            self._timer.cancel()
            self._timer = None
        self._at = at
        if self._timer is None:
            self._timer = self._loop.call_at(at, self._fired)

    def close(self) -> None:
        """Ends the timer, and drops the function, which usually refers to the owner of this object."""
        self._on_passed = _nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fired(self) -> None:
        self._timer = None
        if self._at > self._loop.time():
            self._timer = self._loop.call_at(self._at, self._fired)
        else:
            self._on_passed()


def _nothing() -> None:
    return None
