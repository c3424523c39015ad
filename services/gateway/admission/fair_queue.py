"""Queues requests while the gateway is full: bounded, with a timeout, and fair between API keys.

Higher priorities leave first. Keys of the same priority take turns by deficit round robin: a key earns credit in
proportion to its weight and pays the cost of its requests, so a busy key delays only itself. A full queue drops the
last request of the key with the most queued requests, so that one key cannot lock out the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic

from services.gateway.admission.errors import queue_full, queue_timeout
from services.gateway.admission.keys import ApiKey

QUANTUM = 1.0
BACKGROUND_SHARE = 0.75
"""Share of the room up to which requests without a waiting client are admitted."""
MAX_COST = 64.0
"""Cost at which one request waits in the queue of its key; a dearer one waits as if it cost this."""
INTERVAL_SMOOTHING = 0.1
MAX_RETRY_S = 60.0
"""Seconds of a `Retry-After` while the queue is full; a longer estimate is announced as this."""


class _Waiter:
    __slots__ = ("cost", "key_id", "queued", "turn")

    def __init__(self, key_id: str, cost: float) -> None:
        self.key_id = key_id
        self.cost = cost
        self.queued = True
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _PriorityClass:
    """The queued requests of one priority."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[_Waiter]] = {}
        self._weights: dict[str, int] = {}
        self._credits: dict[str, float] = {}
        self._round: deque[str] = deque()  # keys with queued requests; the first has the turn

    def __bool__(self) -> bool:
        return bool(self._round)

    def add(self, waiter: _Waiter, weight: int) -> None:
        self._weights[waiter.key_id] = weight
        queue = self._queues.get(waiter.key_id)
        if queue is None:
            queue = self._queues[waiter.key_id] = deque()
            self._credits[waiter.key_id] = 0.0
            self._round.append(waiter.key_id)
        queue.append(waiter)

    def next(self) -> _Waiter:
        while True:
            key_id = self._round[0]
            queue = self._queues[key_id]
            if self._credits[key_id] >= queue[0].cost:
                waiter = queue.popleft()
                waiter.queued = False
                self._credits[key_id] -= waiter.cost
                self._remove_if_empty(key_id)
                return waiter
            self._credits[key_id] += QUANTUM * self._weights[key_id]
            self._round.rotate(-1)

    def remove(self, waiter: _Waiter) -> None:
        self._queues[waiter.key_id].remove(waiter)
        waiter.queued = False
        self._remove_if_empty(waiter.key_id)

    def longest(self) -> deque[_Waiter]:
        return max(self._queues.values(), key=len)

    def waiting(self, key_id: str) -> int:
        return len(self._queues.get(key_id, ()))

    def _remove_if_empty(self, key_id: str) -> None:
        if not self._queues[key_id]:
            del self._queues[key_id], self._weights[key_id], self._credits[key_id]
            self._round.remove(key_id)


class FairQueue:
    """Admits up to `max_running` requests at a time and queues up to `max_waiting` others.

    Args:
        timeout_s: longest wait of a request.
        clock: monotonic clock, seconds.

    Attributes:
        max_running: maximum number of requests admitted at a time.
    """

    def __init__(
        self, max_running: int, max_waiting: int, timeout_s: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self.max_running = max_running
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._clock = clock
        self._classes: dict[int, _PriorityClass] = {}
        self._interval_s = 0.0  # moving average of the time between two requests that leave
        self._left_at = 0.0
        self.running = 0
        self.waiting = 0

    def try_enter(self) -> bool:
        """Admits a request if there is room and the queue is empty; `leave` must follow."""
        if self.waiting or self.running >= self.max_running:
            return False
        self.running += 1
        return True

    def try_enter_in_background(self) -> bool:
        """As `try_enter`, but leaves a part of the room to requests with waiting clients."""
        return self.running < self.max_running * BACKGROUND_SHARE and self.try_enter()

    async def enter(self, key: ApiKey, cost: float = 1.0, timeout_s: float | None = None) -> None:
        """Waits until a request is admitted; `leave` must follow.

        Args:
            key: key of the request.
            cost: share of the key's turns that the request uses; 1 for an ordinary one.
            timeout_s: longest wait, if shorter than that of the queue.

        Raises:
            SluiceError: OVERLOADED, `overloaded`, if the queue is full or the wait too long.
        """
        if self.try_enter():
            return
        if self.waiting >= self._max_waiting and not self._make_room(key):
            raise queue_full(self.retry_after_s)
        priority_class = self._classes.setdefault(key.priority, _PriorityClass())
        waiter = _Waiter(key.id, min(cost, MAX_COST))
        priority_class.add(waiter, key.weight)
        self.waiting += 1
        limit_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        try:
            if not await self._wait(waiter, priority_class, limit_s):
                # Not raised in the handler: the TimeoutError would be its context, and references this task.
                raise queue_timeout(limit_s, self.retry_after_s)
        finally:
            del waiter  # Break the reference cycle: the traceback references this frame.

    async def _wait(self, waiter: _Waiter, priority_class: _PriorityClass, timeout_s: float) -> bool:
        """Waits for the turn of a request; returns False after the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await waiter.turn
        except BaseException as error:
            if waiter.queued:
                priority_class.remove(waiter)
                self.waiting -= 1
            elif not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self.leave()  # admitted at the same moment
            if not isinstance(error, TimeoutError):
                raise
            return False
        finally:
            del waiter
        return True

    def leave(self) -> None:
        """Releases an admitted request and admits the next ones."""
        self.running -= 1
        self._measure()
        while self.waiting and self.running < self.max_running:
            waiter = self._classes[max(priority for priority, queued in self._classes.items() if queued)].next()
            self.waiting -= 1
            if not waiter.turn.done():  # not cancelled at the same moment
                self.running += 1
                waiter.turn.set_result(None)

    def _measure(self) -> None:
        now = self._clock()
        if self._left_at:
            self._interval_s += ((now - self._left_at) - self._interval_s) * INTERVAL_SMOOTHING
        self._left_at = now if self.waiting else 0.0

    @property
    def retry_after_s(self) -> float:
        """Estimated time until all queued requests are admitted."""
        return min(max(self._interval_s * (self.waiting + 1), 1.0), MAX_RETRY_S)

    def _make_room(self, key: ApiKey) -> bool:
        """Drops a queued request with less claim to its place than one of `key`; returns False if there is none."""
        priorities = [priority for priority, queued in self._classes.items() if queued and priority <= key.priority]
        if not priorities:
            return False
        priority = min(priorities)
        lowest = self._classes[priority]
        longest = lowest.longest()
        if priority == key.priority and len(longest) <= lowest.waiting(key.id) + 1:
            return False
        dropped = longest[-1]
        lowest.remove(dropped)
        self.waiting -= 1
        if not dropped.turn.done():  # not cancelled at the same moment
            dropped.turn.set_exception(queue_full(self.retry_after_s))
        return True
