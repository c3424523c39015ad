"""A lane: a queue of calls and the one child at a time that runs them in order.

A lane is idle (no child), opening (a task starts one) or running. Calls take an idle lane to opening, and so does the
end of a child in a lane that stays up; a child that is ready takes it to running. A child that ends, breaks the
protocol, exceeds the time of a call or sends its last reply takes it back to idle.

Calls that are ready are sent in one write, and the child has the next ones before it has answered the current one.
When the child ends, only the current call can be at fault; the others are sent again to the next child.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from services.common.base.errors import SluiceError, unavailable
from services.common.base.tasks import TaskOwner
from services.common.child_rpc.process import Child

log = logging.getLogger(__name__)

MAX_BATCH_BYTES = 4 << 20
"""Bytes of the calls that are written to a child at once."""
PAUSE_S = (0.1, 5.0)

T = TypeVar("T")


def stopping() -> SluiceError:
    """Returns the error of calls during shutdown."""
    return unavailable("The service is stopping.")


@dataclass(eq=False, slots=True)
class Call(Generic[T]):
    """One call.

    Attributes:
        data: the request.
        future: its result; settled on the lane's event loop only.
        attempts: number of children that ended while they ran it.
        origin: whom the call is made for, where that matters; else empty.
        started_at: when a child began to run it, by the event loop's clock.
    """

    data: bytes
    future: asyncio.Future[T] | concurrent.futures.Future[T]
    attempts: int = 0
    origin: str = ""
    started_at: float = 0.0

    def resolve(self, result: T | SluiceError) -> None:
        """Settles the future unless its caller has given up."""
        if self.future.done():
            return
        if isinstance(result, SluiceError):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


class Lane(ABC, Generic[T]):
    """Belongs to one event loop.

    Args:
        tasks: owns the task that opens it.
        call_s: maximum time of one call.
        window: maximum number of calls that the child has at once.

    Attributes:
        child: the running one.
        replies: number of its replies.
        restarts: number of children that failed.
        waiting: calls to send.
        sent: calls without a reply, in the order of their replies.
        stays_up: it is opened again whenever its child has ended.
    """

    def __init__(self, tasks: TaskOwner, call_s: float, window: int) -> None:
        self.tasks = tasks
        self.child: Child | None = None
        self.replies = self.restarts = 0
        self.waiting: deque[Call[T]] = deque()
        self.sent: deque[Call[T]] = deque()
        self.stays_up = False
        self._call_s = call_s
        self._window = window
        self._barren = 0  # children in a row, of a lane that stays up, that replied to nothing
        self._head_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[Any] | None = None
        self._closed = False

    @abstractmethod
    async def open(self) -> Child:
        """Returns a child that is ready; raises SluiceError."""

    @abstractmethod
    def read(self, reply: bytes) -> T | SluiceError:
        """Returns the result of a reply; raises ValueError, TypeError or KeyError for one that breaks the protocol."""

    @abstractmethod
    def failed(self, timed_out: bool) -> T | SluiceError:
        """Returns the result of a call whose child ended, or that exceeded its time, and that is not repeated."""

    def is_last(self, reply: bytes) -> bool:
        """Whether the child ends after a reply."""
        return False

    def repeats(self, call: Call[T]) -> bool:
        """Whether a call is repeated whose child ended: earlier ones may have used up the child's memory."""
        return self.replies > 0 and not call.attempts

    def on_added(self) -> None:
        """Called when a call was added to those that wait."""

    def on_ran(self, call: Call[T]) -> None:
        """Called when a call does not run any more."""

    def on_idle(self) -> None:
        """Called when nothing is left to do."""

    @property
    def outstanding(self) -> int:
        """Number of calls without a reply."""
        return len(self.waiting) + len(self.sent)

    async def start(self) -> None:
        """Opens the lane, which then stays up; raises SluiceError if it does not open."""
        self._opening = asyncio.current_task()
        try:
            child = await self.open()
        finally:
            self._opening = None
        self.stays_up = True
        self._use(child)

    def submit(self, data: bytes, origin: str = "") -> tuple[asyncio.Future[T], Callable[[], None]]:
        """Queues a call; returns its result, and what removes the call unless a child has it already."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        call = Call(data, future, origin=origin)
        self.add(call)
        return future, lambda: self._remove(call)

    def add(self, call: Call[T]) -> None:
        """Queues a call."""
        if self._closed:
            call.resolve(stopping())
            return
        self.waiting.append(call)
        self.on_added()
        self.send_ready()

    def _remove(self, call: Call[T]) -> None:
        call.future.cancel()
        with suppress(ValueError):
            self.waiting.remove(call)

    def send_ready(self) -> None:
        """Sends as many calls as the window allows."""
        if self.child is None:
            if (self.waiting or self.stays_up) and self._opening is None and not self._closed:
                self._opening = self.tasks.spawn(self._open(), "child process")
            return
        batch: list[bytes] = []
        size = 0
        while self.waiting and len(self.sent) < self._window and size < MAX_BATCH_BYTES:
            call = self.waiting.popleft()
            if call.future.done():
                continue
            self.sent.append(call)
            if len(self.sent) == 1:
                self._start_timer()
            batch.append(call.data)
            size += len(call.data)
        if batch:
            self.child.send(*batch)
        elif not self.sent:
            self.on_idle()

    def drop(self) -> None:
        """Ends the child; its calls wait for the next one."""
        self.waiting.extendleft(reversed(self.sent))
        self.sent.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        child, self.child = self.child, None
        if child is not None:
            child.kill()

    def fail_all(self, error: Callable[[], SluiceError]) -> None:
        """Fails each waiting call with its own error: a shared one would retain the frames of all."""
        while self.waiting:
            self.waiting.popleft().resolve(error())

    def stop(self) -> None:
        """Ends the child, and fails the remaining calls with UNAVAILABLE."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        self.drop()
        self.fail_all(stopping)

    async def _open(self) -> None:
        try:
            while True:
                if self._barren:
                    await asyncio.sleep(min(PAUSE_S[0] * 2 ** (self._barren - 1), PAUSE_S[1]))
                try:
                    child = await self.open()
                    break
                except SluiceError as error:
                    if not self.stays_up:
                        failed = error
                        self.fail_all(failed.copy)
                        return
                    log.warning("a child process does not start: %s", error.message)
                    self._barren += 1
        finally:
            self._opening = None
        self._use(child)

    def _use(self, child: Child) -> None:
        child.on_frame, child.on_lost = self._on_frame, lambda: self._fail(timed_out=False)
        self.child, self.replies = child, 0
        self.send_ready()

    def _on_frame(self, reply: bytes) -> None:
        if not self.sent:
            self._fail(timed_out=False)  # an unsolicited reply
            return
        try:
            result = self.read(reply)
        except (ValueError, TypeError, KeyError):
            self._fail(timed_out=False)
            return
        call = self.sent.popleft()
        self.on_ran(call)
        ends = self.is_last(reply)
        again = ends and self.repeats(call)
        self.replies += 1
        self._barren = 0
        if ends:
            self.drop()
        elif self.sent:
            self._start_timer()
        if again:
            self._repeat(call)
        else:
            call.resolve(result)
        self.send_ready()

    def _fail(self, timed_out: bool) -> None:
        call = self.sent.popleft() if self.sent else None
        again = call is not None and not timed_out and self.repeats(call)
        if self.stays_up:
            log.warning("a child process ended and is being restarted", extra={"pid": self.child and self.child.pid})
            self._barren += not self.replies
        self.restarts += 1
        self.drop()
        if call is not None:
            self.on_ran(call)
            if again:
                self._repeat(call)
            else:
                call.resolve(self.failed(timed_out))
        self.send_ready()

    def _repeat(self, call: Call[T]) -> None:
        call.attempts += 1
        self.waiting.appendleft(call)

    def _start_timer(self) -> None:
        """Records that the first sent call starts running now."""
        loop = asyncio.get_running_loop()
        self._head_since = self.sent[0].started_at = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._call_s, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if not self.sent:
            return
        end = self._head_since + self._call_s
        loop = asyncio.get_running_loop()
        if loop.time() < end:
            self._timer = loop.call_at(end, self._check_deadline)
        else:
            self._fail(timed_out=True)
