"""Background tasks with an owner: none fails unnoticed, none outlives the service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

log = logging.getLogger(__name__)

CANCEL_EVERY_S = 0.25
CANCEL_ATTEMPTS = 20


def asked_to_end() -> bool:
    """Whether the current task is being cancelled; if not, a CancelledError in it comes from what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def end_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancels unfinished tasks and waits until all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class TaskOwner:
    """Owns tasks that run until closed.

    A task that raises is logged and reported to `on_death`, which usually stops the process: a service that lost one of
    its loops must not appear healthy.
    """

    def __init__(self, on_death: Callable[[str, BaseException], None] | None = None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_death = on_death
        self._closing = False

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Starts a task, which may return at any time."""
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None or self._closing:
            return
        log.error("background task %s failed", task.get_name(), exc_info=error)
        if self._on_death is not None:
            self._on_death(task.get_name(), error)

    @property
    def alive(self) -> int:
        """The number of running tasks."""
        return len(self._tasks)

    async def close(self) -> None:
        """Cancels running tasks and waits for them.

        A cancellation can get lost when a timeout inside a library expires at the same moment and swallows it, so it is
        repeated a bounded number of times.
        """
        self._closing = True
        pending = set(self._tasks)
        for _ in range(CANCEL_ATTEMPTS):
            if not pending:
                return
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=CANCEL_EVERY_S)
        log.error("tasks did not end after cancellation: %s", ", ".join(sorted(task.get_name() for task in pending)))


class Stop(asyncio.Event):
    """Set when the process should drain and exit; `fail` makes the exit code 1."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = False

    async def unless_set(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Runs work until it completes or this is set; returns whether it completed, and raises what it raises."""
        task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return task.done()
        finally:
            await end_all((task, stopping))

    def fail(self, name: str, error: BaseException) -> None:
        """Stops the process because a background task died; fits `TaskOwner(on_death=...)`."""
        self.failed = True
        self.set()
