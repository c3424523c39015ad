"""Requests that wait because every worker is busy: served by priority, then by arrival.

Each replica has lines of its own, one a model. A line moves when this replica hears that a request is over, and every
POLL_S, because other replicas' requests end too and the load book is shared.
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


class Attempt(Protocol[T]):  # type: ignore[misc]
    """Tries to place a request. AllBusy when no worker takes it; `again` False: only if it is placed already."""

    def __call__(self, *, place: bool = True) -> Awaitable[T]: ...


class ServiceRate:
    """How fast a model's requests end, and so how long the next ones have to wait.

    Args:
        now_s: seconds of any clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._interval_s: float | None = None
        self._last = 0.0

    def ended(self, number: int) -> None:
        """So many requests ended now."""
        if not number:
            return
        now = self._now_s()
        if self._last:
            each = (now - self._last) / number
            self._interval_s = each if self._interval_s is None else 0.8 * self._interval_s + 0.2 * each
        self._last = now

    def wait_ms(self, ahead: int) -> int:
        """When it makes sense to come again, with so many ahead."""
        if self._interval_s is None:
            return UNKNOWN_MS
        return round(min(max(self._interval_s * 1000 * (ahead + 1), SOONEST_MS), LATEST_MS))


@dataclass(order=True, slots=True)
class _Waiter(Generic[T]):
    priority: int
    number: int
    scope: Hashable = field(compare=False)
    patient: bool = field(compare=False)
    attempt: Attempt[T] = field(compare=False)
    answer: asyncio.Future[T] = field(compare=False)


class _AdmissionQueue(Generic[T]):
    def __init__(self) -> None:
        self.waiters: list[_Waiter[T]] = []
        self.moved = asyncio.Event()


class AdmissionQueues(Generic[T]):
    """See the module.

    Args:
        most: longest line; the last one in it is refused when somebody with a better priority comes.
        abandon: gives back what was placed for a caller that left meanwhile.
    """

    def __init__(self, tasks: TaskOwner, most: int, abandon: Callable[[T], Coroutine[Any, Any, None]]) -> None:
        self._tasks = tasks
        self._most = most
        self._abandon = abandon
        self._lines: dict[str, _AdmissionQueue[T]] = {}
        self._paces: dict[str, ServiceRate] = {}
        self._numbers = count()

    def length(self, model: str) -> int:
        """How many wait."""
        line = self._lines.get(model)
        return len(line.waiters) if line else 0

    def ended(self, model: str, number: int) -> None:
        """So many of a model's requests are over; 0: others gave load back, as when their prompts were computed."""
        self._paces.setdefault(model, ServiceRate()).ended(number)
        if (line := self._lines.get(model)) is not None:
            line.moved.set()

    async def admit(
        self, model: str, attempt: Attempt[T], priority: int = 0, max_wait_ms: int = 0, scope: Hashable = None
    ) -> tuple[T, int]:
        """Places a request, at once or after waiting in line.

        Args:
            scope: requests of equal scope can run on the same workers, so when one cannot, none of them can.

        Returns:
            What `attempt` returned, and how long it waited in line, milliseconds.

        Raises:
            AllBusy: no worker took it in time, or the line is full; says when to come again.
            SluiceError: as `attempt`.
        """
        line = self._lines.get(model)
        try:
            return await attempt(place=line is None), 0
        except AllBusy:
            if not max_wait_ms and line is None and self._lines.get(model) is None:
                raise self._refusal(model) from None
        return await self._wait(model, attempt, priority, min(max_wait_ms, LONGEST_WAIT_MS), scope)

    async def _wait(
        self, model: str, attempt: Attempt[T], priority: int, max_wait_ms: int, scope: Hashable
    ) -> tuple[T, int]:
        started = time.monotonic()
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(priority, next(self._numbers), scope, bool(max_wait_ms), attempt, answer)
        line = self._join(model, waiter)
        try:
            # The impatient ones are answered by the next round.
            async with asyncio.timeout(max_wait_ms / 1000 if max_wait_ms else LONGEST_WAIT_MS / 1000):
                return await answer, int((time.monotonic() - started) * 1000)
        except BaseException as error:
            if _placed(answer):  # in the moment in which its caller gave up
                self._tasks.spawn(self._abandon(answer.result()), f"abandon-{model}")
            if not isinstance(error, TimeoutError):
                raise
        finally:
            if waiter in line.waiters:
                line.waiters.remove(waiter)
            del waiter, answer  # what is raised holds this call, which must not hold it as well
        raise self._refusal(model)  # not where the timeout is caught: its own error knows this task

    def _join(self, model: str, waiter: _Waiter[T]) -> _AdmissionQueue[T]:
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = _AdmissionQueue()
            self._tasks.spawn(self._serve(model, line), f"line-{model}")
        elif len(line.waiters) >= self._most:
            last = line.waiters[-1]
            if last < waiter:
                raise self._refusal(model)
            line.waiters.pop()
            _fail(last, self._refusal(model))
        bisect.insort(line.waiters, waiter)
        line.moved.set()
        return line

    def _refusal(self, model: str) -> AllBusy:
        pace = self._paces.get(model)
        return AllBusy(pace.wait_ms(self.length(model)) if pace else UNKNOWN_MS)

    async def _serve(self, model: str, line: _AdmissionQueue[T]) -> None:
        """Runs while anybody waits."""
        try:
            while line.waiters:
                line.moved.clear()
                await self._round(model, line)
                if line.waiters:
                    await _within(line.moved.wait(), POLL_S)
        finally:
            del self._lines[model]
            for waiter in line.waiters:  # this router stops
                _fail(waiter, unavailable("This router replica is stopping; use another one.", code="stopping"))

    async def _round(self, model: str, line: _AdmissionQueue[T]) -> None:
        """Everybody gets a turn, but of those that can run on the same workers only as many as succeed."""
        stuck: set[Hashable] = set()
        for waiter in list(line.waiters):
            if waiter.answer.done():
                continue
            if waiter.scope not in stuck and not await self._try(waiter):
                stuck.add(waiter.scope)
            if waiter.scope in stuck and not waiter.patient:
                _fail(waiter, self._refusal(model))
        line.waiters = [waiter for waiter in line.waiters if not waiter.answer.done()]

    async def _try(self, waiter: _Waiter[T]) -> bool:
        try:
            found = await waiter.attempt()
        except AllBusy:
            return False
        except Exception as error:  # its own caller hears it
            _fail(waiter, error)
            return True
        if waiter.answer.done():
            await self._abandon(found)
        else:
            waiter.answer.set_result(found)
        return True


def _fail(waiter: _Waiter[T], error: Exception) -> None:
    if not waiter.answer.done():
        waiter.answer.set_exception(error)


def _placed(answer: asyncio.Future[T]) -> bool:
    return answer.done() and not answer.cancelled() and answer.exception() is None


async def _within(event: Awaitable[object], timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event, timeout_s)
    except TimeoutError:
        return
