"""Notices at once when a process of the engine dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable


class ChildWatch:
    """Watches processes by id, from the event loop.

    Args:
        on_death: called with the id of each process that ended.
    """

    def __init__(self, pids: Iterable[int], on_death: Callable[[int], None]) -> None:
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._handles: dict[int, int] = {}
        for pid in pids:
            try:
                self._handles[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._loop.call_soon(self._on_death, pid)
            else:
                self._loop.add_reader(self._handles[pid], self._died, pid)

    def close(self) -> None:
        """Stops watching; may be called twice."""
        for pid in tuple(self._handles):
            self._forget(pid)

    def _died(self, pid: int) -> None:
        self._forget(pid)
        self._on_death(pid)

    def _forget(self, pid: int) -> None:
        handle = self._handles.pop(pid)
        self._loop.remove_reader(handle)
        os.close(handle)
