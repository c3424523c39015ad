"""Queues for requests that wait while every worker is busy, ordered by priority and then by arrival.

Each replica has one queue per model. A queue is retried when a request completes on this replica, and every POLL_S
seconds, because reservations are shared and requests of other replicas complete too.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

from services.common.errors import unavailable
from services.common.tasks import TaskOwner
from services.router.reservations.table import AllBusy

POLL_S = 0.25
LONGEST_WAIT_MS = 600_000
SOONEST_MS, LATEST_MS, UNKNOWN_MS = 100, 30_000, 1_000

T = TypeVar("T")


class SchedulingAttempt(Protocol[T]):  # type: ignore[misc]
    """Tries to place a request; raises AllBusy if no worker accepts it.

    With `place` False, it succeeds only for a request that was placed before.
    """

    def __call__(self, *, place: bool = True) -> Awaitable[T]: ...


class ServiceRate:
    """Completion rate of a model's requests, from which waiting times are estimated.

    Args:
        now_s: returns seconds of a monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._interval_s: float | None = None
        self._last = 0.0

    def ended(self, number: int) -> None:
        """Records that this number of requests completed now."""
        if not number:
            return
        now = self._now_s()
        if self._last:
            each = (now - self._last) / number
            self._interval_s = each if self._interval_s is None else 0.8 * self._interval_s + 0.2 * each
        self._last = now

    def wait_ms(self, ahead: int) -> int:
        """Returns the estimated time until a worker is free for a request with this many ahead of it."""
        if self._interval_s is None:
            return UNKNOWN_MS
        return round(min(max(self._interval_s * 1000 * (ahead + 1), SOONEST_MS), LATEST_MS))


@dataclass(order=True, slots=True)
class _Waiter(Generic[T]):
    priority: int
    number: int
    scope: Hashable = field(compare=False)
    may_wait: bool = field(compare=False)
    attempt: SchedulingAttempt[T] = field(compare=False)
    result: asyncio.Future[T] = field(compare=False)


class _AdmissionQueue(Generic[T]):
    def __init__(self) -> None:
        self.waiters: list[_Waiter[T]] = []
        self.changed = asyncio.Event()


class AdmissionQueues(Generic[T]):
    """Admits requests, or queues them while all workers are busy.

    Args:
        most: maximum length of a queue; when it is full, a request with better priority displaces the last one.
        abandon: undoes the placement of a request whose caller has disconnected.
    """

    def __init__(self, tasks: TaskOwner, most: int, abandon: Callable[[T], Coroutine[Any, Any, None]]) -> None:
        self._tasks = tasks
        self._most = most
        self._abandon = abandon
        self._queues: dict[str, _AdmissionQueue[T]] = {}
        self._rates: dict[str, ServiceRate] = {}
        self._numbers = count()

    def length(self, model: str) -> int:
        """Returns the number of waiting requests."""
        queue = self._queues.get(model)
        return len(queue.waiters) if queue else 0

    def ended(self, model: str, number: int) -> None:
        """Records completed requests of a model (0: load was released otherwise) and retries its queue."""
        self._rates.setdefault(model, ServiceRate()).ended(number)
        if (queue := self._queues.get(model)) is not None:
            queue.changed.set()

    async def admit(
        self, model: str, attempt: SchedulingAttempt[T], priority: int = 0, max_wait_ms: int = 0, scope: Hashable = None
    ) -> tuple[T, int]:
        """Places a request, immediately or after waiting in the queue.

        Args:
            scope: requests of equal scope can run on the same workers; if one cannot be placed, the others cannot
                either.

        Returns:
            The result of `attempt`, and the time in the queue in milliseconds.

        Raises:
            AllBusy: no worker accepted it in time, or the queue is full; has the time to retry after.
            SluiceError: as raised by `attempt`.
        """
        queue = self._queues.get(model)
        try:
            return await attempt(place=queue is None), 0
        except AllBusy:
            if not max_wait_ms and queue is None and self._queues.get(model) is None:
                raise self._all_busy(model) from None
        return await self._wait(model, attempt, priority, min(max_wait_ms, LONGEST_WAIT_MS), scope)

    async def _wait(
        self, model: str, attempt: SchedulingAttempt[T], priority: int, max_wait_ms: int, scope: Hashable
    ) -> tuple[T, int]:
        started = time.monotonic()
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(priority, next(self._numbers), scope, bool(max_wait_ms), attempt, result)
        queue = self._join(model, waiter)
        try:
            # Requests that may not wait are resolved by the next round.
            async with asyncio.timeout(max_wait_ms / 1000 if max_wait_ms else LONGEST_WAIT_MS / 1000):
                return await result, int((time.monotonic() - started) * 1000)
        except BaseException as error:
            if _placed(result):  # placed just as its caller gave up
                self._tasks.spawn(self._abandon(result.result()), f"abandon-{model}")
            if not isinstance(error, TimeoutError):
                raise
        finally:
            if waiter in queue.waiters:
                queue.waiters.remove(waiter)
            del waiter, result  # break the reference cycle: the traceback references this frame
        raise self._all_busy(model)  # outside the handler: the TimeoutError references this task

    def _join(self, model: str, waiter: _Waiter[T]) -> _AdmissionQueue[T]:
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = _AdmissionQueue()
            self._tasks.spawn(self._serve(model, queue), f"admission-queue-{model}")
        elif len(queue.waiters) >= self._most:
            last = queue.waiters[-1]
            if last < waiter:
                raise self._all_busy(model)
            queue.waiters.pop()
            _fail(last, self._all_busy(model))
        bisect.insort(queue.waiters, waiter)
        queue.changed.set()
        return queue

    def _all_busy(self, model: str) -> AllBusy:
        rate = self._rates.get(model)
        return AllBusy(rate.wait_ms(self.length(model)) if rate else UNKNOWN_MS)

    async def _serve(self, model: str, queue: _AdmissionQueue[T]) -> None:
        """Retries a queue until it is empty."""
        try:
            while queue.waiters:
                queue.changed.clear()
                await self._round(model, queue)
                if queue.waiters:
                    await _wait_at_most(queue.changed.wait(), POLL_S)
        finally:
            del self._queues[model]
            for waiter in queue.waiters:  # only when this router stops
                _fail(waiter, unavailable("This router replica is stopping; retry on another one.", code="stopping"))

    async def _round(self, model: str, queue: _AdmissionQueue[T]) -> None:
        """Tries each waiting request once; of equal scopes, stops at the first failure."""
        blocked: set[Hashable] = set()
        for waiter in list(queue.waiters):
            if waiter.result.done():
                continue
            if waiter.scope not in blocked and not await self._try(waiter):
                blocked.add(waiter.scope)
            if waiter.scope in blocked and not waiter.may_wait:
                _fail(waiter, self._all_busy(model))
        queue.waiters = [waiter for waiter in queue.waiters if not waiter.result.done()]

    async def _try(self, waiter: _Waiter[T]) -> bool:
        try:
            placed = await waiter.attempt()
        except AllBusy:
            return False
        except Exception as error:  # raised to the caller of this request
            _fail(waiter, error)
            return True
        if waiter.result.done():
            await self._abandon(placed)
        else:
            waiter.result.set_result(placed)
        return True


def _fail(waiter: _Waiter[T], error: Exception) -> None:
    if not waiter.result.done():
        waiter.result.set_exception(error)


def _placed(result: asyncio.Future[T]) -> bool:
    return result.done() and not result.cancelled() and result.exception() is None


async def _wait_at_most(event: Awaitable[object], timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event, timeout_s)
    except TimeoutError:
        return
