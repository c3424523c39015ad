"""Queues for requests that wait for a worker: while every worker is busy, or while the model has none.

Each replica has one queue per model, ordered by priority, then by deadline, then by fairness among the callers, then by
arrival. A queue is retried when a request completes on this replica, and periodically, because reservations are shared
and requests of other replicas complete too. The store compares the first request of each replica's queue: a request
that another replica's first one precedes is not placed, so priorities and deadlines hold across replicas. Of equals,
the one that has waited clearly longer precedes.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from services.common.base.errors import ErrorKind, SluiceError, quoted, unavailable
from services.common.base.shared_steps import shared_step
from services.common.base.tasks import TaskOwner
from services.router.scheduling.disaggregation import DisaggPlanner
from services.router.scheduling.queries import Query
from services.router.scheduling.service_rate import UNKNOWN_MS, ServiceRate
from services.router.state.reservations.table import NO_DEADLINE, AllBusy, BusyReason, QueueOrder

log = logging.getLogger(__name__)

POLL_S = 0.25
PREPARED_AT_ONCE = 32
CONTENDED_POLL_S = 0.025  # while other replicas have queues: their workers become free without notice to this one
MAX_WAIT_MS = 600_000
"""Milliseconds that a query waits for a worker, whatever it asks for; then it fails."""

T = TypeVar("T")


class NoWorkers(SluiceError):
    """A model has no worker that accepts requests."""


@dataclass(frozen=True, slots=True)
class WaitTerms:
    """Rank of a request in the queue, and how long and with what it waits.

    Attributes:
        priority: lower is served first.
        deadline_unix_ms: when the first token is due, Unix milliseconds; requests of equal priority are served in this
            order, those without a deadline last.
        fairness_id: caller among whose requests places are shared evenly.
        max_wait_ms: longest wait while all workers are busy; 0: none.
        max_wait_for_workers_ms: longest wait while the model has no worker; 0: none.
        size: bytes that the request holds while it waits.
        scope: requests of equal scope can run on the same workers; if one cannot be placed, the others cannot either.
    """

    priority: int = 0
    deadline_unix_ms: int = NO_DEADLINE
    fairness_id: str = ""
    max_wait_ms: int = 0
    max_wait_for_workers_ms: int = 0
    size: int = 0
    scope: Hashable = None

    @property
    def order(self) -> QueueOrder:
        """What the queues of several replicas are compared by."""
        return QueueOrder(self.priority, self.deadline_unix_ms)

    def limit_ms(self, reason: Reason) -> int:
        """Returns the longest wait for a reason; 0: none."""
        return self.max_wait_ms if reason is Reason.CAPACITY else self.max_wait_for_workers_ms


def wait_terms(query: Query, wait_ms: int, wait_for_workers_ms: int, disagg: DisaggPlanner) -> WaitTerms:
    """Returns the terms of a query.

    Args:
        wait_ms: longest wait while all workers are busy, of a query that names none.
        wait_for_workers_ms: the same while the model has no worker.
    """
    return WaitTerms(
        priority=query.priority,
        deadline_unix_ms=query.deadline_unix_ms or NO_DEADLINE,
        fairness_id=query.fairness_id,
        max_wait_ms=query.max_wait_ms or wait_ms,
        max_wait_for_workers_ms=query.max_wait_for_workers_ms or wait_for_workers_ms,
        size=query.prompt.size,
        scope=(query.candidates, query.role, query.require_pair, disagg.may_bypass(query)),
    )


class SchedulingAttempt(Protocol[T]):  # type: ignore[misc]
    """Tries to place a request; raises AllBusy if no worker accepts it, NoWorkers if the model has none.

    With `place` False, it succeeds only for a request that was placed before.
    """

    def __call__(self, *, place: bool = True) -> Awaitable[T]: ...


Announce = Callable[[str, QueueOrder | None], Awaitable[int]]
"""Publishes the first request of a model's queue, or None for an empty one; returns how many others have a queue."""


async def _alone(model: str, order: QueueOrder | None) -> int:
    return 0


async def _nothing() -> None:
    return


class Reason(Enum):
    """What the requests of a queue wait for."""

    CAPACITY = "capacity"
    WORKERS = "workers"


class _Entry(NamedTuple, Generic[T]):
    attempt: SchedulingAttempt[T]
    prepare: Callable[[], Awaitable[None]]


@dataclass(order=True, slots=True)
class _Waiter(Generic[T]):
    order: QueueOrder
    turn: int
    number: int
    terms: WaitTerms = field(compare=False)
    entry: _Entry[T] = field(compare=False)
    result: asyncio.Future[T] = field(compare=False)
    limit: asyncio.Timeout = field(compare=False)
    since: float = field(compare=False, default_factory=lambda: _now())

    def restart(self, reason: Reason) -> None:
        """Starts the longest wait for a reason; without one, the next round fails the request."""
        limit_ms = min(self.terms.limit_ms(reason) or MAX_WAIT_MS, MAX_WAIT_MS)
        self.limit.reschedule(min(_now() + limit_ms / 1000, self.since + MAX_WAIT_MS / 1000))


class _AdmissionQueue(Generic[T]):
    """The waiting requests of a model, in order.

    Of equal order, those of different callers take turns: a caller's n-th waiting request has turn n, counted from
    the turn that was served last.
    """

    def __init__(self, reason: Reason) -> None:
        self.waiters: list[_Waiter[T]] = []
        self.changed = asyncio.Event()
        self.reason = reason
        self._turn = 0
        self._turns: dict[str, int] = {}

    def next_turn(self, fairness_id: str) -> int:
        turn = self._turns[fairness_id] = max(self._turns.get(fairness_id, 0), self._turn) + 1
        return turn

    def served(self, waiter: _Waiter[T]) -> None:
        """Records that a request was placed."""
        self._turn = max(self._turn, waiter.turn)

    def forget_callers(self) -> None:
        """Drops the turns of callers without waiting requests."""
        if len(self._turns) > 2 * len(self.waiters) + 64:
            waiting = {waiter.terms.fairness_id for waiter in self.waiters}
            self._turns = {name: turn for name, turn in self._turns.items() if name in waiting or turn > self._turn}


class AdmissionQueues(Generic[T]):
    """Admits requests, or queues them while no worker accepts them.

    Args:
        most: maximum length of a queue; when it is full, a request that precedes the last one displaces it.
        abandon: undoes the placement of a request whose caller has disconnected.
        most_bytes: maximum size of all waiting requests.
        announce: publishes the first request of a queue to other replicas.
    """

    def __init__(
        self,
        tasks: TaskOwner,
        most: int,
        abandon: Callable[[T], Coroutine[Any, Any, None]],
        most_bytes: int = 1 << 30,
        announce: Announce = _alone,
    ) -> None:
        self._tasks = tasks
        self._most = most
        self._most_bytes = most_bytes
        self._abandon = abandon
        self._announce = announce
        self._queues: dict[str, _AdmissionQueue[T]] = {}
        self._rates: dict[str, ServiceRate] = {}
        self._numbers = count()
        self._bytes = 0

    @property
    def waiting(self) -> dict[tuple[str, Reason], int]:
        """Number of waiting requests by model and what they wait for; only models with a queue."""
        return {(model, queue.reason): len(queue.waiters) for model, queue in self._queues.items()}

    def length(self, model: str) -> int:
        """Returns the number of waiting requests."""
        queue = self._queues.get(model)
        return len(queue.waiters) if queue else 0

    def ended(self, model: str, number: int) -> None:
        """Records completed requests of a model (0: load was released otherwise) and retries its queue."""
        (self._rates.get(model) or self._rates.setdefault(model, ServiceRate())).ended(number)
        if (queue := self._queues.get(model)) is not None:
            queue.changed.set()

    async def admit(
        self,
        model: str,
        attempt: SchedulingAttempt[T],
        terms: Callable[[], WaitTerms] = WaitTerms,
        prepare: Callable[[], Awaitable[None]] = _nothing,
    ) -> tuple[T, int]:
        """Places a request, immediately or after waiting in the queue.

        Args:
            terms: returns how it waits, if it has to.
            prepare: does the work that `attempt` needs and that requires workers, for many requests at a time; called
                when the first workers of a model appear. `attempt` raises what it could not do.

        Returns:
            The result of `attempt`, and the time in the queue in milliseconds.

        Raises:
            AllBusy: no worker accepted it in time, or the queue is full; has the time to retry after.
            NoWorkers: the model got no worker in time.
            SluiceError: as raised by `attempt`.
        """
        queue = self._queues.get(model)
        reason = Reason.CAPACITY
        try:
            return await attempt(place=queue is None), 0
        except AllBusy:
            waits = terms()
            if not waits.max_wait_ms and queue is None and self._queues.get(model) is None:
                raise self._all_busy(model) from None
        except NoWorkers:
            reason, waits = Reason.WORKERS, terms()
            if not waits.max_wait_for_workers_ms:
                raise
        return await self._wait(model, _Entry(attempt, prepare), waits, reason)

    async def _wait(self, model: str, entry: _Entry[T], terms: WaitTerms, reason: Reason) -> tuple[T, int]:
        started, result = time.monotonic(), asyncio.get_running_loop().create_future()
        queue, waiter = self._join(model, entry, terms, result, reason)
        self._bytes += terms.size
        try:
            async with waiter.limit:
                waiter.restart(reason)
                return await result, int((time.monotonic() - started) * 1000)
        except BaseException as error:
            if result.done() and not result.cancelled() and result.exception() is None:  # placed as its caller gave up
                self._tasks.spawn(self._abandon(result.result()), f"abandon-{model}")
            if not isinstance(error, TimeoutError):
                raise
        finally:
            self._bytes -= terms.size
            queue.waiters = [waiter for waiter in queue.waiters if waiter.result is not result]
            del result, waiter  # break the reference cycle: the traceback references this frame
        # Outside the handler: the TimeoutError references this task.
        raise no_workers(model) if queue.reason is Reason.WORKERS else self._all_busy(model, BusyReason.EXPIRED)

    def _join(
        self,
        model: str,
        entry: _Entry[T],
        terms: WaitTerms,
        result: asyncio.Future[T],
        reason: Reason,
    ) -> tuple[_AdmissionQueue[T], _Waiter[T]]:
        if self._bytes + terms.size > self._most_bytes:
            raise self._all_busy(model)
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = _AdmissionQueue(reason)
            self._tasks.spawn(self._serve(model, queue), f"admission-queue-{model}")
        turn, number = queue.next_turn(terms.fairness_id), next(self._numbers)
        waiter = _Waiter(terms.order, turn, number, terms, entry, result, asyncio.timeout(None))
        if len(queue.waiters) >= self._most:
            last = queue.waiters[-1]
            if last < waiter:
                raise self._all_busy(model)
            queue.waiters.pop()
            _fail(last, self._all_busy(model, BusyReason.DISPLACED))
        bisect.insort(queue.waiters, waiter)
        queue.changed.set()
        return queue, waiter

    def _all_busy(self, model: str, reason: BusyReason = BusyReason.SATURATED) -> AllBusy:
        rate = self._rates.get(model)
        return AllBusy(rate.wait_ms(self.length(model)) if rate else UNKNOWN_MS, reason)

    async def _serve(self, model: str, queue: _AdmissionQueue[T]) -> None:
        """Retries a queue until it is empty."""
        _log(model, queue)
        try:
            while queue.waiters:
                queue.changed.clear()
                reason = queue.reason
                first = queue.waiters[0]
                order = first.order._replace(waited_ms=int((_now() - first.since) * 1000))
                contended = await self._announce(model, order) > 0
                await self._round(model, queue)
                if queue.reason is not reason:
                    _log(model, queue)
                if queue.waiters:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(CONTENDED_POLL_S if contended else POLL_S):
                            await queue.changed.wait()
        finally:
            del self._queues[model]
            for waiter in queue.waiters:  # only when this router stops
                _fail(waiter, unavailable("This router replica is stopping; retry on another one.", code="stopping"))
        await self._announce(model, None)

    @shared_step("router.admission")
    async def _round(self, model: str, queue: _AdmissionQueue[T]) -> None:
        """Tries each waiting request once; of equal scopes, stops at the first failure."""
        if queue.reason is Reason.WORKERS:
            await _prepare(queue.waiters)
        blocked: set[Hashable] = set()
        reason = Reason.CAPACITY
        error: SluiceError = self._all_busy(model)
        for waiter in list(queue.waiters):
            if waiter.result.done():
                continue
            if reason is Reason.CAPACITY and waiter.terms.scope not in blocked:
                try:
                    await self._try(queue, waiter)
                except AllBusy:
                    blocked.add(waiter.terms.scope)
                except NoWorkers as missing:
                    reason, error = Reason.WORKERS, missing.with_traceback(None)
            if (reason is Reason.WORKERS or waiter.terms.scope in blocked) and not waiter.terms.limit_ms(reason):
                _fail(waiter, error)
        queue.waiters = [waiter for waiter in queue.waiters if not waiter.result.done()]
        if queue.reason is not reason:
            queue.reason = reason
            for waiter in queue.waiters:
                waiter.restart(reason)
        queue.forget_callers()

    async def _try(self, queue: _AdmissionQueue[T], waiter: _Waiter[T]) -> None:
        """Tries a waiting request; raises AllBusy or NoWorkers if it has to wait."""
        try:
            placed = await waiter.entry.attempt()
        except (AllBusy, NoWorkers):
            raise
        except Exception as error:  # raised to the caller of this request
            _fail(waiter, error)
            return
        queue.served(waiter)
        if waiter.result.done():
            try:
                await self._abandon(placed)
            except Exception:  # it expires with its lifetime; the other requests are served all the same
                log.exception("releasing the reservation of a caller that has left failed")
        else:
            waiter.result.set_result(placed)


async def _prepare(waiters: Sequence[_Waiter[Any]]) -> None:
    for start in range(0, len(waiters), PREPARED_AT_ONCE):
        some = [waiter for waiter in waiters[start : start + PREPARED_AT_ONCE] if not waiter.result.done()]
        prepared = await asyncio.gather(*(waiter.entry.prepare() for waiter in some), return_exceptions=True)
        for waiter, result in zip(some, prepared, strict=True):
            if isinstance(result, Exception):
                _fail(waiter, result)


def no_workers(model: str) -> NoWorkers:
    """Returns the error for a model without workers that accept requests."""
    message = f"No worker serves model {quoted(model)} at the moment; retry later."
    return NoWorkers(ErrorKind.UNAVAILABLE, message, code="no_workers", retry_after_ms=1000)


def _log(model: str, queue: _AdmissionQueue[Any]) -> None:
    log.info("requests wait", extra={"model": model, "for": queue.reason.value, "number": len(queue.waiters)})


def _fail(waiter: _Waiter[T], error: Exception) -> None:
    if not waiter.result.done():
        waiter.result.set_exception(error)


def _now() -> float:
    return asyncio.get_running_loop().time()
