"""Embedded store: holds the state of a single router process."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

from services.common.base.errors import ErrorKind, SluiceError
from services.router.state.kv_index.events import (
    BlocksChanged,
    BlocksReplaced,
    Change,
    EventBatch,
    Snapshot,
    WorkerDown,
    WorkerDraining,
    WorkerUp,
)
from services.router.state.kv_index.index import BlockIndex
from services.router.state.kv_index.rank_cache import ApplyResult
from services.router.state.reservations.cost import Offer
from services.router.state.reservations.table import Reservation, ReservationParams, ReservationTable, ReservedRank
from services.router.state.store.base import (
    ENDED_FOR_MS,
    KNOWN_FOR_S,
    Applied,
    FellBehind,
    Lease,
    Position,
    Pulse,
    Store,
    StoredModel,
)
from services.router.state.store.session_affinity import LocalSessionAffinity
from services.router.state.workers.claims import Claim, Claims, Hold
from services.router.state.workers.worker import Worker, WorkerRank

QUIET_S = 0.5
MAX_ENDED = 50_000
"""Requests that ended in the last 30 s and are remembered; the oldest is forgotten."""

FEED_LIMIT = 1_024  # followers run in the same process and are never far behind


_STARTED_NS = time.time_ns() - time.monotonic_ns()


def unix_ms() -> int:
    """Returns the current Unix milliseconds."""
    return time.time_ns() // 1_000_000


def steady_unix_ms() -> int:
    """Returns the current Unix milliseconds by the clock as it was when this process started, wherever it moves."""
    return (_STARTED_NS + time.monotonic_ns()) // 1_000_000


def older_epoch(worker: Worker) -> SluiceError:
    """Returns the error for the registration of an earlier start of a worker."""
    return SluiceError(
        ErrorKind.FAILED_PRECONDITION,
        f"Worker {worker.worker_id} is registered with a higher epoch than {worker.epoch}; raise it at every start.",
        param="epoch",
        code="stale_epoch",
    )


@dataclass(slots=True)
class _Record:
    worker: Worker
    session: str
    lease_until_ms: int
    report: bytes = b""


class _Model:
    def __init__(self, now_ms: Callable[[], int], random: Random, feed_limit: int) -> None:
        self.records: dict[str, _Record] = {}
        self.index = BlockIndex()
        self.book = ReservationTable(now_ms, random)
        self.feed = StoreFeed(feed_limit)
        self.registered_ms = 0
        self.name_pin = "", 0  # the record and when it lapses
        self.pins = LocalSessionAffinity(now_ms)
        self._now_ms = now_ms
        self.ended: dict[str, int] = {}
        self.departed: dict[str, tuple[Worker, int]] = {}  # by id, with the time at which their reservations end

    def free(self, request_ids: Sequence[str]) -> list[str]:
        """Releases all load of requests; returns the ids without reservations."""
        now = self._now_ms()
        while self.ended and (len(self.ended) > MAX_ENDED or self.ended[next(iter(self.ended))] <= now - ENDED_FOR_MS):
            del self.ended[next(iter(self.ended))]
        self.ended |= dict.fromkeys(request_ids, now)
        return self.book.free(request_ids)

    def ended_lately(self, request_id: str) -> bool:
        """Returns whether a request was freed in the last ENDED_FOR_MS."""
        return self.ended.get(request_id, 0) > self._now_ms() - ENDED_FOR_MS

    def owned(self, worker_id: str, session: str) -> _Record | None:
        record = self.records.get(worker_id)
        return record if record is not None and record.session == session else None

    def applied(self, slot: WorkerRank, outcome: ApplyResult) -> Applied:
        cache = self.index.cache(slot)
        return Applied(outcome, 0 if cache is None else cache.sequence)

    def arrive(self, worker: Worker) -> None:
        """Ends the reservations of the process that had the id before, unless it is the same one."""
        last, _ = self.departed.pop(worker.worker_id, (worker, 0))
        if (last.epoch, last.holder) != (worker.epoch, worker.holder):
            self.book.drop_worker(worker.worker_id)

    def end_departed(self) -> None:
        """Ends the reservations of workers that have not registered again in time."""
        now = self._now_ms()
        for worker_id in [worker_id for worker_id, (_, until) in self.departed.items() if until <= now]:
            del self.departed[worker_id]
            self.book.drop_worker(worker_id)

    def drop(self, worker_id: str, keep_reservations: bool) -> None:
        record = self.records.pop(worker_id)
        for slot in record.worker.slots:
            self.index.drop(slot)
        if not keep_reservations:
            self.book.drop_worker(worker_id)


class MemoryStore(Store):
    """Implements Store in memory.

    Args:
        now_ms: returns Unix milliseconds.
        feed_limit: maximum changes in the feed of a model.
    """

    embedded = True

    def __init__(
        self,
        now_ms: Callable[[], int] = steady_unix_ms,
        random: Random | None = None,
        feed_limit: int = FEED_LIMIT,
    ) -> None:
        self._now_ms = now_ms
        self._random = random or Random()
        self._feed_limit = feed_limit
        self._models: dict[str, _Model] = {}
        self._claims = Claims(now_ms)

    def _model(self, model: str) -> _Model:
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _Model(self._now_ms, self._random, self._feed_limit)
        return found

    def index(self, model: str) -> BlockIndex:
        return self._model(model).index

    async def ping(self) -> None:
        """Does nothing: an embedded store is always available."""

    async def close(self) -> None:
        """Does nothing: there are no connections."""

    async def models(self) -> list[str]:
        since = self._now_ms() - KNOWN_FOR_S * 1000
        return [name for name, model in self._models.items() if model.registered_ms > since]

    async def claim(self, claim: Claim, session: str, lease_ms: int) -> None:
        self._claims.claim(claim, session, lease_ms)

    async def renew_claim(self, worker_id: str, session: str, lease_ms: int) -> Hold:
        return self._claims.hold(worker_id, session, lease_ms)

    async def release_claim(self, worker_id: str, session: str) -> None:
        self._claims.release(worker_id, session)

    async def register(self, worker: Worker, session: str, lease_ms: int) -> dict[int, int]:
        model = self._model(worker.model)
        known = model.records.get(worker.worker_id)
        if known is not None and known.worker.holder != worker.holder:
            model.drop(worker.worker_id, keep_reservations=False)
            model.feed.append(WorkerDown(worker.worker_id, known.worker.epoch))
            known = None
        if known is not None and known.worker.epoch > worker.epoch:
            raise older_epoch(worker)
        model.arrive(worker)
        if known is not None and known.worker.epoch < worker.epoch:
            model.drop(worker.worker_id, keep_reservations=False)
        now = self._now_ms()
        worker = replace(worker, draining=False)
        model.records[worker.worker_id] = _Record(worker, session, now + lease_ms)
        model.registered_ms = now
        for slot in worker.slots:
            model.index.open(slot, worker.epoch, worker.total_blocks)
        model.feed.append(WorkerUp(worker))
        return model.index.sequences(worker.slots)

    async def renew(self, model: str, worker_id: str, session: str, lease_ms: int, report: bytes | None) -> Lease:
        record = self._model(model).records.get(worker_id)
        if record is None:
            return Lease.GONE
        if record.session != session:
            return Lease.REPLACED
        self._model(model).registered_ms = self._now_ms()
        record.lease_until_ms = self._now_ms() + lease_ms
        if report is not None:
            record.report = report
        return Lease.HELD

    async def leave(self, model: str, worker_id: str, session: str) -> bool:
        state = self._model(model)
        record = state.owned(worker_id, session)
        if record is not None and not record.worker.draining:
            record.worker = replace(record.worker, draining=True)
            state.feed.append(WorkerDraining(worker_id, record.worker.epoch))
        return record is not None

    async def remove(
        self, model: str, worker_id: str, session: str, keep_reservations: bool = False, awaited_ms: int = 0
    ) -> bool:
        state = self._model(model)
        record = state.owned(worker_id, session)
        if record is not None:
            awaited = awaited_ms > 0 and not keep_reservations
            state.drop(worker_id, keep_reservations or awaited)
            if awaited:
                state.departed[worker_id] = record.worker, self._now_ms() + awaited_ms
            state.feed.append(WorkerDown(worker_id, record.worker.epoch))
        return record is not None

    async def apply(
        self, model: str, worker_id: str, epoch: int, capacity: int, batches: Sequence[EventBatch]
    ) -> list[Applied]:
        state = self._model(model)
        applied = []
        for batch in batches:
            slot = WorkerRank(worker_id, batch.rank)
            outcome = state.index.apply(slot, epoch, batch)
            if outcome is ApplyResult.APPLIED:
                state.feed.append(BlocksChanged(slot, epoch, batch))
            applied.append(state.applied(slot, outcome))
        return applied

    async def replace(self, model: str, worker_id: str, epoch: int, capacity: int, snapshot: Snapshot) -> Applied:
        state = self._model(model)
        slot = WorkerRank(worker_id, snapshot.rank)
        outcome = state.index.replace(slot, epoch, snapshot)
        if outcome is ApplyResult.APPLIED:
            state.feed.append(BlocksReplaced(slot, epoch, snapshot.sequence))
        return state.applied(slot, outcome)

    async def load(self, model: str) -> StoredModel:
        state = self._model(model)
        return StoredModel(state.feed.position, [record.worker for record in state.records.values()])

    async def blocks(self, model: str, slot: WorkerRank) -> tuple[int, Snapshot] | None:
        cache = self._model(model).index.cache(slot)
        return None if cache is None else (cache.epoch, cache.snapshot(slot.rank))

    def follow(self, model: str, position: Position) -> AsyncIterator[list[Change]]:
        return self._model(model).feed.follow(position)

    async def select(self, model: str, offers: Sequence[Offer], terms: ReservationParams) -> ReservedRank:
        choice = self._model(model).book.select(offers, terms)
        self._model(model).ended.pop(terms.request_id, None)  # it was freed before and is retried
        return choice

    async def book(self, model: str, reservation: Reservation) -> None:
        if not self._model(model).ended_lately(reservation.request_id):
            self._model(model).book.put_later(reservation)

    async def progress(self, model: str, outputs: Mapping[str, int]) -> list[str]:
        return self._model(model).book.progress(outputs)

    async def renew_owners(self, model: str, owners: Sequence[str], lease_ms: int) -> None:
        self._model(model).book.renew_owners(owners, lease_ms)

    async def mark_prefill_complete(self, model: str, request_ids: Sequence[str]) -> list[str]:
        return self._model(model).book.mark_prefill_complete(request_ids)

    async def free(self, model: str, request_ids: Sequence[str]) -> list[str]:
        return self._model(model).free(request_ids)

    async def session(self, model: str, session_id: str) -> WorkerRank | None:
        return self._model(model).pins.get(session_id)

    async def remember_session(self, model: str, session_id: str, slot: WorkerRank, ttl_ms: int) -> None:
        self._model(model).pins.put(session_id, slot, ttl_ms)

    async def pin(self, model: str, record: str, ttl_ms: int, replace: bool) -> str:
        state, now = self._model(model), self._now_ms()
        held, until = state.name_pin
        held = held if until > now else ""
        if not record:
            return held
        held = record if replace else held or record
        state.name_pin = held, now + ttl_ms
        return held

    async def pulse(self, model: str) -> Pulse:
        state = self._model(model)
        state.book.expire()
        reports = {worker_id: record.report for worker_id, record in state.records.items() if record.report}
        return Pulse(state.book.loads, reports)

    async def sweep(self, model: str, lease_ms: int) -> int:
        state = self._model(model)
        now = self._now_ms()
        expired = [record for record in state.records.values() if record.lease_until_ms <= now]
        for record in expired:
            await self.remove(model, record.worker.worker_id, record.session, awaited_ms=lease_ms)
        state.end_departed()
        return len(expired) + state.book.expire()

    async def correct(self, model: str, slot: WorkerRank, most: int, age_ms: int, computed: bool) -> tuple[int, int]:
        return self._model(model).book.correct(slot, most, age_ms, computed)

    async def sweep_owners(self, model: str) -> int:
        return self._model(model).book.drop_owners()


class StoreFeed:
    """Numbered changes, at most the latest `limit`."""

    def __init__(self, limit: int) -> None:
        self._changes: deque[Change] = deque(maxlen=limit)
        self._last = 0
        self._appended = asyncio.Event()

    @property
    def position(self) -> Position:
        """Position after the last change."""
        return Position(self._last)

    def append(self, change: Change) -> None:
        """Appends a change and notifies followers."""
        self._changes.append(change)
        self._last += 1
        self._appended.set()
        self._appended = asyncio.Event()

    async def follow(self, position: Position) -> AsyncIterator[list[Change]]:
        """Implements Store.follow."""
        number = position.number
        while True:
            oldest = self._last - len(self._changes)
            if not oldest <= number <= self._last:
                raise FellBehind
            if number < self._last:
                changes = list(islice(self._changes, number - oldest, None))
                number = self._last
                yield changes
                continue
            try:
                async with asyncio.timeout(QUIET_S):
                    await self._appended.wait()
            except TimeoutError:
                yield []
