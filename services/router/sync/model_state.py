"""One replica's view of one model: built from the store, kept current by its change feed, answered from without I/O."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from services.router.kv_index.events import (
    BlocksChanged,
    BlocksReplaced,
    Change,
    Kind,
    Snapshot,
    WorkerDown,
    WorkerDraining,
    WorkerUp,
)
from services.router.kv_index.index import BlockIndex, Overlap
from services.router.kv_index.predictions import Predictions
from services.router.kv_index.rank_cache import Outcome
from services.router.reservations.cost import Load
from services.router.store.base import Position, Pulse, Store
from services.router.workers.registry import Registry
from services.router.workers.worker import KV_EVENTS, Worker, WorkerRank

LOADS_AT_ONCE = 16
BYTES_AT_ONCE = 64 << 10  # of block hashes, between two looks at what else there is to do


class Asking:
    """A question to the store that changes one worker, from before it is sent until its answer is here."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.overtaken = False
        """The feed spoke of the worker meanwhile. It brings the asked change too, in its place among the others."""


class ModelState:
    """The index of a model, and the loads last seen. Its workers are in the registry.

    Args:
        index: kept by an embedded store, and only read here; None for one of the view's own.
        predictions: what ranks are expected to hold, beside what they reported.
    """

    def __init__(
        self,
        model: str,
        registry: Registry,
        index: BlockIndex | None = None,
        predictions: Predictions | None = None,
    ) -> None:
        self.model = model
        self.index = BlockIndex() if index is None else index
        self._owns_index = index is None
        self.predictions = predictions or Predictions()
        self.loads: dict[WorkerRank, Load] = {}
        self.reports: dict[str, bytes] = {}
        self.loaded = asyncio.Event()
        self._registry = registry
        self._current_at = time.monotonic()
        self._meanwhile: list[Change] | None = None
        self._askings: set[Asking] = set()
        self._generation: bytes | None = None
        self._orphans: dict[str, tuple[int, float]] = {}  # epoch, since when

    @property
    def age_ms(self) -> int:
        """Since the view was last known to be current."""
        return int((time.monotonic() - self._current_at) * 1000)

    def touch(self) -> None:
        """The view is current."""
        self._current_at = time.monotonic()

    @property
    def workers(self) -> list[Worker]:
        """Of this model, draining ones included."""
        return self._registry.workers(self.model)

    def find(self, worker_id: str) -> Worker | None:
        """A worker of this model, draining or not."""
        return self._registry.get(self.model, worker_id)

    def match(self, hashes: Sequence[int]) -> Mapping[WorkerRank, Overlap]:
        """How much of a prompt each rank holds or is expected to hold; ranks with nothing are left out."""
        return self.predictions.added_to(self.index.match(hashes), hashes)

    def expect(
        self, worker: Worker, slot: WorkerRank, hashes: Sequence[int], overlap: Overlap, request_id: str
    ) -> None:
        """A request was booked on a rank: it will hold the prompt's blocks soon."""
        silent = KV_EVENTS not in worker.capabilities
        self.predictions.expect(slot, hashes, overlap, request_id, silent, worker.total_blocks)

    def sequences(self, worker: Worker) -> dict[int, int]:
        """The last sequence number applied, by rank, for ranks that have one."""
        return self.index.sequences(worker.slots)

    async def rebuild(self, store: Store) -> Position:
        """Reads everything anew while the old view goes on answering; returns the position to follow from."""
        self._meanwhile = []
        try:
            state = await store.load(self.model)
            # What was made before this is in the state, or the feed brings it: the view follows from here.
            self._meanwhile = []
            for asking in self._askings:
                asking.overtaken = True
            for worker in state.workers:
                self._orphans.pop(worker.worker_id, None)
            index = await self._read(store, state.workers) if self._owns_index else self.index
        finally:
            meanwhile, self._meanwhile = self._meanwhile, None
        old, self.index = self.index, index
        alive = {worker.worker_id for worker in state.workers}
        alive |= {change.worker.worker_id for change in meanwhile if isinstance(change, WorkerUp)}
        missing = [worker for worker in self.workers if worker.worker_id not in alive]
        self._missed(missing, old, forgotten=self._generation not in (None, state.generation))
        self._generation = state.generation
        for worker in state.workers:
            self._registry.up(worker)
        for change in meanwhile:  # made here while reading, and perhaps not in what was read
            self.apply(change)
        self.touch()
        self.loaded.set()
        return state.position

    def _missed(self, missing: list[Worker], old: BlockIndex, forgotten: bool) -> None:
        """Workers the store does not know are gone; but a store that lost everything hears of them again soon."""
        for worker in missing:
            if not forgotten and worker.worker_id not in self._orphans:
                self._registry.down(self.model, worker.worker_id, worker.epoch)
                continue
            self._orphans.setdefault(worker.worker_id, (worker.epoch, time.monotonic()))
            for slot in worker.slots:
                self.index.open(slot, worker.epoch, worker.total_blocks)
                if (holding := old.holding(slot)) is not None:
                    self.index.replace(slot, holding.epoch, holding.snapshot(slot.rank))

    def drop_orphans(self, after_s: float) -> None:
        """Gives up on workers that a store which lost everything did not hear of again in this time."""
        for worker_id, (epoch, since) in list(self._orphans.items()):
            if time.monotonic() - since > after_s:
                self.apply(WorkerDown(worker_id, epoch))

    async def _read(self, store: Store, workers: list[Worker]) -> BlockIndex:
        index = BlockIndex()
        gate = asyncio.Semaphore(LOADS_AT_ONCE)

        async def read(worker: Worker, slot: WorkerRank) -> None:
            async with gate:
                found = await store.blocks(self.model, slot)
            index.open(slot, worker.epoch, worker.total_blocks)
            if found is None:
                return
            epoch, snapshot = found
            for _ in index.filling(slot, epoch, snapshot, BYTES_AT_ONCE):
                await asyncio.sleep(0)  # the old view answers meanwhile

        await asyncio.gather(*(read(worker, slot) for worker in workers for slot in worker.slots))
        return index

    async def follow(self, store: Store, changes: Iterable[Change]) -> int:
        """Applies changes in order; reads ranks from the store where the feed alone does not do. Returns how many."""
        unsure, work = set(), 0
        for change in changes:
            self._overtake(change)
            if (slot := self.apply(change)) is not None:
                unsure.add(slot)
            if isinstance(change, BlocksChanged):
                work += change.batch.bytes
            if work > BYTES_AT_ONCE:
                work = 0
                await asyncio.sleep(0)  # questions come first
        for slot in unsure:
            found = await store.blocks(self.model, slot)
            if found is not None:
                self.index.replace(slot, *found)
        self.touch()
        return len(unsure)

    @contextmanager
    def asking(self, worker_id: str) -> Iterator[Asking]:
        """While inside, the store is asked to change a worker; apply that here too unless the feed was faster."""
        asking = Asking(worker_id)
        self._askings.add(asking)
        try:
            yield asking
        finally:
            self._askings.discard(asking)

    def _overtake(self, change: Change) -> None:
        match change:
            case WorkerUp(Worker(worker_id=worker_id)) | WorkerDraining(worker_id, _) | WorkerDown(worker_id, _):
                for asking in self._askings:
                    asking.overtaken |= asking.worker_id == worker_id

    def apply(self, change: Change) -> WorkerRank | None:
        """Applies one change; returns the rank whose blocks have to be read from the store, if any.

        Changes may come twice or late: epochs and sequence numbers tell.
        """
        if self._meanwhile is not None:
            self._meanwhile.append(change)
        unsure = self._applied(change)
        if isinstance(change, BlocksChanged | BlocksReplaced):
            self._settle(change)
        return unsure

    def _settle(self, change: BlocksChanged | BlocksReplaced) -> None:
        slot = change.slot
        if isinstance(change, BlocksChanged) and any(op.kind is Kind.CLEARED for op in change.batch.ops):
            self.predictions.forget(slot)
        else:
            self.predictions.settle(slot, partial(self.index.holds, slot))

    def _applied(self, change: Change) -> WorkerRank | None:
        match change:
            case BlocksChanged() | BlocksReplaced() if not self._owns_index:
                pass
            case BlocksChanged(slot, epoch, batch):
                outcome = self.index.apply(slot, epoch, batch)
                return slot if outcome in (Outcome.GAP, Outcome.OVERFLOW) else None
            case BlocksReplaced(slot, epoch, sequence):
                holding = self.index.holding(slot)
                stale = holding is None or holding.epoch != epoch or holding.sequence > sequence
                return None if stale else slot
            case WorkerUp(worker):
                self._up(worker)
            case WorkerDraining(worker_id, epoch):
                self._registry.drain(self.model, worker_id, epoch)
            case WorkerDown(worker_id, epoch):
                self._orphans.pop(worker_id, None)
                gone = self._registry.down(self.model, worker_id, epoch)
                if gone is not None:
                    self._forget(gone)
        return None

    def take(self, pulse: Pulse) -> None:
        """Takes the loads last read; reports of workers that are gone are forgotten."""
        self.loads = pulse.loads
        alive = {worker.worker_id for worker in self.workers}
        self.reports = {name: report for name, report in (self.reports | pulse.reports).items() if name in alive}

    def replace(self, slot: WorkerRank, epoch: int, snapshot: Snapshot) -> None:
        """Takes a rank's snapshot."""
        if self._owns_index:
            self.index.replace(slot, epoch, snapshot)

    def _up(self, worker: Worker) -> None:
        known = self._registry.get(self.model, worker.worker_id)
        if known is not None and known.epoch > worker.epoch:
            return
        self._orphans.pop(worker.worker_id, None)
        if known is not None and known.epoch < worker.epoch:
            self._forget(known)
        if self._owns_index:
            for slot in worker.slots:
                self.index.open(slot, worker.epoch, worker.total_blocks)
        self._registry.up(worker)

    def _forget(self, worker: Worker) -> None:
        for slot in worker.slots:
            if self._owns_index:
                self.index.drop(slot)
            self.predictions.forget(slot)
            self.loads.pop(slot, None)
        self.reports.pop(worker.worker_id, None)
