"""Detects the exit of the engine's child processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable


class ChildWatch:
    """Monitors processes with pidfds on the event loop.

    Args:
        on_exit: Receives the id of each process that exits.
    """

    def __init__(self, pids: Iterable[int], on_exit: Callable[[int], None]) -> None:
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._handles: dict[int, int] = {}
        for pid in pids:
            try:
                self._handles[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._loop.call_soon(self._on_exit, pid)
            else:
                self._loop.add_reader(self._handles[pid], self._exited, pid)

    def close(self) -> None:
        """Stops monitoring; may be called twice."""
        for pid in tuple(self._handles):
            self._forget(pid)

    def _exited(self, pid: int) -> None:
        self._forget(pid)
        self._on_exit(pid)

    def _forget(self, pid: int) -> None:
        handle = self._handles.pop(pid)
        self._loop.remove_reader(handle)
        os.close(handle)
