"""Calls that several forks of a server run."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from services.common.child_rpc.call_queue import Call, CallQueue
from services.common.child_rpc.fork_server import ForkServer
from services.common.errors import ErrorKind, SluiceError
from services.common.tasks import TaskOwner

WINDOW = 2

T = TypeVar("T")


class ForkPool(ABC, Generic[T]):
    """The forks are started on first use and replaced when they fail; belongs to one event loop.

    Args:
        server: makes the forks.
        processes: number of forks.
        limit_s: maximum time of a call.
        subject: what the calls are about, for errors, such as "media files".

    Attributes:
        lanes: the queue of each fork.
    """

    def __init__(self, server: ForkServer, processes: int, limit_s: float, subject: str) -> None:
        self.server = server
        self.subject = subject
        self.tasks = TaskOwner()
        self.lanes = [_Lane(self, limit_s) for _ in range(processes)]

    @abstractmethod
    def read(self, reply: bytes) -> T:
        """Returns the result of a reply; a fork that was taken over may send anything."""

    @abstractmethod
    def failed(self, timed_out: bool) -> T:
        """Returns the result of a call whose fork ended, or exceeded the time of the call."""

    @abstractmethod
    def is_last(self, reply: bytes) -> bool:
        """Returns whether a fork ends after a reply."""

    def add(self, data: bytes) -> tuple[asyncio.Future[T], Callable[[], None]]:
        """Queues a call; returns its result, and what removes the call unless a fork has it already.

        The result raises SluiceError: INTERNAL if no fork starts, UNAVAILABLE after `close`.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        call, lane = Call(data, future), min(self.lanes, key=lambda lane: lane.outstanding)
        lane.add(call)
        return future, lambda: lane.remove(call)

    async def close(self) -> None:
        """Ends the processes."""
        await self.tasks.close()
        for lane in self.lanes:
            lane.close()
        await self.server.close()


class _Lane(CallQueue[T]):
    """The calls of one fork."""

    def __init__(self, pool: ForkPool[T], limit_s: float) -> None:
        super().__init__(limit_s, WINDOW)
        self._pool = pool
        self._opening: asyncio.Task[None] | None = None

    def add(self, call: Call[T]) -> None:
        self.waiting.append(call)
        self.send_ready()

    def remove(self, call: Call[T]) -> None:
        """Removes a call for which no caller waits any more, unless a fork has it already."""
        call.future.cancel()
        with suppress(ValueError):
            self.waiting.remove(call)

    def on_no_child(self) -> None:
        if self._opening is None:
            self._opening = self._pool.tasks.spawn(self._open(), f"process for {self._pool.subject}")

    async def _open(self) -> None:
        try:
            child, _ = await self._pool.server.fork()
            assert child is not None, "this service's greeting is never an error"
        except (OSError, EOFError, ValueError):
            await self._pool.server.close()
            subject = self._pool.subject
            self._end_all(SluiceError(ErrorKind.INTERNAL, f"No process for {subject} could be started; see the log."))
            return
        finally:
            self._opening = None
        self.use(child)

    def on_reply(self, call: Call[T], reply: bytes) -> None:
        call.resolve(self._pool.read(reply))
        if self._pool.is_last(reply):
            self.drop()

    def on_failure(self, timed_out: bool) -> None:
        """Fails the call that was running, but tries it again once if others may have used up the memory."""
        head = self.take_head()
        tainted = self.replies > 0
        self.drop()
        if head is not None and not timed_out and tainted and not head.attempts:
            head.attempts += 1
            self.waiting.appendleft(head)
        elif head is not None:
            head.resolve(self._pool.failed(timed_out))

    def close(self) -> None:
        self.drop()
        self._end_all(SluiceError(ErrorKind.UNAVAILABLE, "The service is stopping."))

    def _end_all(self, error: SluiceError) -> None:
        while self.waiting:
            self.waiting.popleft().resolve(error)
