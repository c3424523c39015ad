"""Calls that one child at a time runs in order.

Calls that are ready are sent in one write, and the child has the next ones before it has answered the current one.
When the child ends, only the current call can be at fault; the others are sent again to the next child.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.common.child_rpc.process import Child
from services.common.errors import SluiceError

MAX_BATCH_BYTES = 4 << 20
"""Bytes of the calls that are written to a child at once."""

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Call(Generic[T]):
    """One call.

    Attributes:
        data: the request.
        future: its result; settled on the queue's event loop only.
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


class CallQueue(ABC, Generic[T]):
    """The calls of one origin and the child that runs them; belongs to one event loop.

    Args:
        limit_s: maximum time of one call.
        window: maximum number of calls that the child has at once.

    Attributes:
        child: the running one.
        replies: number of its replies.
        waiting: calls to send.
        sent: calls without a reply, in the order of their replies.
    """

    def __init__(self, limit_s: float, window: int) -> None:
        self.child: Child | None = None
        self.replies = 0
        self.waiting: deque[Call[T]] = deque()
        self.sent: deque[Call[T]] = deque()
        self._limit_s = limit_s
        self._window = window
        self._head_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def on_reply(self, call: Call[T], reply: bytes) -> None:
        """Resolves a call."""

    @abstractmethod
    def on_failure(self, timed_out: bool) -> None:
        """Handles a child that ended, broke the protocol or exceeded the time of its call; must call `drop`."""

    def on_empty(self) -> None:
        """Called when nothing is left to do."""

    def on_no_child(self) -> None:
        """Called when calls wait without a child."""

    @property
    def outstanding(self) -> int:
        """Number of calls without a reply."""
        return len(self.waiting) + len(self.sent)

    def use(self, child: Child) -> None:
        """Runs calls in a child that is ready."""
        child.on_frame, child.on_lost = self._on_frame, self._on_lost
        self.child, self.replies = child, 0
        self.send_ready()

    def send_ready(self) -> None:
        """Sends as many calls as the window allows."""
        if self.child is None:
            if self.waiting:
                self.on_no_child()
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
            self.on_empty()

    def take_head(self) -> Call[T] | None:
        """Removes and returns the call that is running."""
        return self.sent.popleft() if self.sent else None

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

    def _on_frame(self, reply: bytes) -> None:
        if not self.sent:
            self._fail(timed_out=False)  # an unsolicited reply
            return
        call = self.sent.popleft()
        self.replies += 1
        if self.sent:
            self._start_timer()
        self.on_reply(call, reply)
        self.send_ready()

    def _on_lost(self) -> None:
        self._fail(timed_out=False)

    def _fail(self, timed_out: bool) -> None:
        self.on_failure(timed_out)
        self.send_ready()

    def _start_timer(self) -> None:
        """Records that the first sent call starts running now."""
        loop = asyncio.get_running_loop()
        self._head_since = loop.time()
        if self.sent:
            self.sent[0].started_at = self._head_since
        if self._timer is None:
            self._timer = loop.call_later(self._limit_s, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if not self.sent:
            return
        end = self._head_since + self._limit_s
        loop = asyncio.get_running_loop()
        if loop.time() < end:
            self._timer = loop.call_at(end, self._check_deadline)
        else:
            self._fail(timed_out=True)
