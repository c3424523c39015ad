"""Waits that end when the caller is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from services.gateway.operations.operation import EventSource

T = TypeVar("T")
Gone = Callable[[], Awaitable[None]]


async def result_unless_gone(gone: Gone, job: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of a job; None, after cancelling the job, if the caller goes first."""
    task = asyncio.get_running_loop().create_task(job)
    disconnect = asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        disconnect.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del task  # Break the reference cycle: the traceback references this frame.


async def run_unless_gone(gone: Gone, done: asyncio.Event, cancel: Callable[[], None]) -> bool:
    """Waits for `done`; returns False, after calling `cancel`, if the caller goes first."""
    waiting = asyncio.get_running_loop().create_task(done.wait())
    disconnect = asyncio.ensure_future(gone())
    try:
        await asyncio.wait((waiting, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if done.is_set():
            return True
        cancel()
        return False
    finally:
        waiting.cancel()
        disconnect.cancel()


class _Wake:
    """A listener that wakes the reader of a source; see EventListener."""

    def __init__(self) -> None:
        self.pending = asyncio.Event()
        self.closed = False

    def notify(self, first: bool = False) -> None:
        self.pending.set()

    def cut(self) -> None:
        self.closed = True
        self.pending.set()


async def events_of(source: EventSource, gone: Gone) -> AsyncIterator[bytes]:
    """Yields the events of a source until its end or until the caller is gone, and stops the source.

    Raises:
        SluiceError: the source failed before its first event.
    """
    wake = _Wake()
    disconnect = asyncio.ensure_future(gone())
    disconnect.add_done_callback(lambda task: wake.cut())
    source.attach(wake)
    try:
        while True:
            await wake.pending.wait()
            wake.pending.clear()
            if wake.closed:
                return
            if (failure := source.failure) is not None:
                raise failure
            last = source.over
            if data := source.take():
                yield data
            if last:
                return
    finally:
        disconnect.cancel()
        source.cancel()
