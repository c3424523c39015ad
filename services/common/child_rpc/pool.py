"""Calls that several forks of a server run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import TaskOwner
from services.common.child_rpc.child import ChildLimits
from services.common.child_rpc.fork_server import ForkServer
from services.common.child_rpc.lane import Lane
from services.common.child_rpc.process import Child

WINDOW = 2

T = TypeVar("T")


class ForkPool(Generic[T]):
    """Lanes whose children are forks of one server; belongs to one event loop.

    The forks are started on first use and replaced when they fail.

    Args:
        server: makes the forks.
        limits: of a fork.
        subject: what the calls are about, for errors, such as "media files".

    Attributes:
        lanes: those that are open to all calls.
    """

    def __init__(self, server: ForkServer, limits: ChildLimits, subject: str) -> None:
        self.server = server
        self.limits = limits
        self.subject = subject
        self.tasks = TaskOwner()
        self.lanes: list[Lane[T]] = []

    def submit(self, data: bytes) -> tuple[asyncio.Future[T], Callable[[], None]]:
        """Queues a call on the least busy lane; see `Lane.submit`."""
        return min(self.lanes, key=lambda lane: lane.outstanding).submit(data)

    async def fork(self) -> Child:
        """Returns one more child; raises SluiceError (INTERNAL) if it does not start."""
        for _ in range(2):
            try:
                child, _greeting = await self.server.fork()
                assert child is not None, "a greeting with an error is of a single fork"
                return child
            except (OSError, EOFError, ValueError) as error:
                failure = error
                await self.server.close()
        raise SluiceError(
            ErrorKind.INTERNAL, f"No process for {self.subject} could be started; see the log."
        ) from failure

    async def close(self) -> None:
        """Ends the processes."""
        for lane in self.lanes:
            lane.stop()
        await self.tasks.close()
        await self.server.close()


class ForkLane(Lane[T]):
    """A lane of a pool."""

    def __init__(self, pool: ForkPool[T], call_s: float = 0.0, window: int = WINDOW) -> None:
        super().__init__(pool.tasks, call_s or pool.limits.call_s, window)
        self._pool = pool

    async def open(self) -> Child:
        return await self._pool.fork()
