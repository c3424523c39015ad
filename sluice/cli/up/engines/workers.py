"""Runs one worker for each server of a registry, and follows the registry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from services.common.net.ports import free_port
from sluice.cli.errors import BadFlag
from sluice.cli.up.engines.entries import BadRegistry, EngineEntry, EngineRegistry, NothingListed
from sluice.cli.up.engines.file import EngineFile
from sluice.cli.up.plan import ListedEngine, Process
from sluice.cli.up.process import Child, exit_words
from sluice.cli.up.progress import View

CHECK_EVERY_S = 1.0
KILL_AFTER_S = 6.0
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0
"""Seconds until a worker of `sluice follow` that ended is started again."""
STEADY_S = 60.0
"""Seconds after which a worker counts as running steadily, so that its next restart is immediate again."""


class WorkerPorts:
    """Assigns a port to each worker, which keeps it when it is restarted; ports of removed workers are used again.

    Args:
        first: the first port of a range without gaps; 0: any free ports.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._ports: dict[str, int] = {}

    def of(self, name: str, present: Collection[str]) -> int:
        """Returns the port of a worker.

        Args:
            present: names of the workers that run or still stop, whose ports are taken.
        """
        if name in self._ports:
            return self._ports[name]
        gone = next((one for one in self._ports if one not in present), None)
        if gone is not None:
            port = self._ports.pop(gone)
        elif self._first:
            port = self._first + len(self._ports)
        else:
            port = free_port()
        self._ports[name] = port
        return port


@dataclass
class _Running:
    """The worker of one server."""

    entry: EngineEntry
    child: Child
    task: asyncio.Task[int]
    started_at: float
    retry_s: float = FIRST_RETRY_S
    restart_at: float | None = None


@dataclass
class EngineWorkers:
    """Starts, restarts and stops workers so that they match the registry.

    A worker ends when its server does; it is started again, with a growing pause, until the entry disappears.

    Args:
        registry: read once a second; while it is invalid, the workers of the last valid list stay.
        process_of: describes the worker of a server, on a port.
        kill_after_s: seconds that a worker has to leave the router and finish its requests.
        on_list: called each time the registry was read, also when it lists nothing.
    """

    registry: EngineRegistry
    process_of: Callable[[EngineEntry, int], Process]
    view: View
    ports: WorkerPorts = field(default_factory=WorkerPorts)
    kill_after_s: float = KILL_AFTER_S
    on_list: Callable[[], None] = lambda: None
    _running: dict[str, _Running] = field(default_factory=dict)
    _stopping: dict[asyncio.Task[None], _Running] = field(default_factory=dict)
    _problem: str = ""

    async def run(self) -> None:
        """Follows the registry until cancelled, then stops all workers."""
        try:
            while True:
                await self._reconcile()
                await asyncio.sleep(CHECK_EVERY_S)
        finally:
            for name in list(self._running):
                self._remove(name)
            if self._stopping:
                await asyncio.wait(self._stopping)

    def kill(self) -> None:
        """Kills the workers that still stop."""
        for running in self._stopping.values():
            running.child.kill()

    async def _reconcile(self) -> None:
        wanted = await self._wanted()
        if wanted is not None:
            for name, running in list(self._running.items()):
                if wanted.get(name) != running.entry:
                    self.view.report(f"removing the engine {name}")
                    self._remove(name)
            busy = {task.get_name() for task in self._stopping}
            for name, entry in wanted.items():
                if name not in self._running and name not in busy:  # the old worker still leaves the router
                    self.view.report(f"adding the engine {name} at {entry.url}")
                    await self._start(entry)
        for running in list(self._running.values()):
            await self._restart_if_ended(running)

    async def _wanted(self) -> dict[str, EngineEntry] | None:
        """Returns the registry's entries by name; None while it is invalid, which is reported once."""
        try:
            entries = await asyncio.to_thread(self.registry.entries)
        except BadRegistry as error:
            if str(error) != self._problem:
                self.view.report(f"{error} The engines stay as they are.", "bold red")
            self._problem = str(error)
            if isinstance(error, NothingListed):
                self.on_list()
            return None
        self._problem = ""
        self.on_list()
        return {entry.name: entry for entry in entries}

    async def _start(self, entry: EngineEntry, retry_s: float = FIRST_RETRY_S) -> None:
        stopping = {task.get_name() for task in self._stopping}
        process = self.process_of(entry, self.ports.of(entry.name, self._running.keys() | stopping))
        self.view.add(process)
        child = Child(process, lambda line: self.view.log(entry.name, line))
        task = await child.start()
        self._running[entry.name] = _Running(entry, child, task, asyncio.get_running_loop().time(), retry_s)

    async def _restart_if_ended(self, running: _Running) -> None:
        now = asyncio.get_running_loop().time()
        if not running.task.done():
            return
        if running.restart_at is None:
            if now - running.started_at > STEADY_S:
                running.retry_s = FIRST_RETRY_S
            running.restart_at = now + running.retry_s
            why = f": {running.child.complaint}" if running.child.complaint else ""
            how = exit_words(running.task.result())
            self.view.report(f"{running.entry.name} {how}{why}; restarting it in {running.retry_s:g} s", "bold yellow")
        elif now >= running.restart_at:
            await self._start(running.entry, min(2 * running.retry_s, MAX_RETRY_S))

    def _remove(self, name: str) -> None:
        running = self._running.pop(name)
        task = asyncio.create_task(_stop(running, self.kill_after_s), name=name)
        self._stopping[task] = running
        task.add_done_callback(self._stopping.pop)


async def _stop(running: _Running, kill_after_s: float) -> None:
    """Lets the worker leave the router and finish its requests; kills it when that takes long."""
    running.child.terminate()
    await asyncio.wait({running.task}, timeout=kill_after_s)
    if not running.task.done():
        running.child.kill()
        await asyncio.wait({running.task}, timeout=KILL_AFTER_S)


class EngineListReader:
    """The list of `sluice up --engines`; see `EngineList`.

    Args:
        file: what it reads, again whenever it changes.
    """

    def __init__(self, file: Path) -> None:
        self._file = EngineFile(file)

    def check(self) -> None:
        """See EngineList."""
        try:
            self._file.entries()
        except BadRegistry as error:
            raise BadFlag(str(error)) from error

    def workers(self, process_of: Callable[[ListedEngine, int], Process], view: View) -> EngineWorkers:
        """See EngineList."""
        return EngineWorkers(self._file, process_of, view)
