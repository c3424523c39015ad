"""State of one model in one replica: loaded from the store, updated by its change feed, queried without I/O."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from services.router.metrics import IndexFigures
from services.router.state.kv_index.events import (
    BlocksChanged,
    BlocksReplaced,
    CacheOperation,
    Change,
    Snapshot,
    WorkerDown,
    WorkerDraining,
    WorkerUp,
)
from services.router.state.kv_index.index import BlockIndex, Overlap
from services.router.state.kv_index.predictions import Predictions
from services.router.state.kv_index.rank_cache import ApplyResult
from services.router.state.reservations.cost import Load
from services.router.state.store.base import Position, Pulse, Store
from services.router.state.workers.registry import Registry
from services.router.state.workers.worker import KV_EVENTS, Worker, WorkerRank

LOADS_AT_ONCE = 16
BYTES_AT_ONCE = 64 << 10  # of block hashes applied before yielding to the event loop


class PendingChange:
    """A change of one worker that was sent to the store and has not returned yet."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.superseded = False
        """The feed contained a change of the worker meanwhile; it then delivers this change too, in order."""


class ModelState:
    """Block index, predictions and last loads of a model; its workers are in the registry.

    Args:
        index: maintained by an embedded store and only read here; None: this object maintains its own.
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
        self._changes_during_load: list[Change] | None = None
        self._pending_changes: set[PendingChange] = set()
        self._generation: bytes | None = None
        self._orphans: dict[str, tuple[int, float]] = {}  # worker id → (epoch, missing since)

    @property
    def age_ms(self) -> int:
        """Milliseconds since the state was last known to be current."""
        return int((time.monotonic() - self._current_at) * 1000)

    @property
    def figures(self) -> IndexFigures:
        """What the metrics show; may be read by their thread."""
        reserved = sum(load.requests for load in list(self.loads.values()))
        return IndexFigures(self.model, self.index.distinct_blocks, self.age_ms / 1000, len(self.predictions), reserved)

    def touch(self) -> None:
        """Marks the state as current."""
        self._current_at = time.monotonic()

    @property
    def workers(self) -> list[Worker]:
        """Workers of this model, including draining ones."""
        return self._registry.workers(self.model)

    def find(self, worker_id: str) -> Worker | None:
        """Returns a worker of this model, draining or not; None if it is unknown."""
        return self._registry.get(self.model, worker_id)

    def match(self, hashes: Sequence[int]) -> Mapping[WorkerRank, Overlap]:
        """Returns the overlap of a prompt with each rank, including predictions; ranks without overlap are omitted."""
        return self.predictions.extend(self.index.match(hashes), hashes)

    def predict(
        self, worker: Worker, slot: WorkerRank, hashes: Sequence[int], overlap: Overlap, request_id: str
    ) -> None:
        """Predicts the blocks that a rank will hold after running a request."""
        no_kv_events = KV_EVENTS not in worker.capabilities
        self.predictions.add(slot, hashes, overlap, request_id, no_kv_events, worker.total_blocks)

    def sequences(self, worker: Worker) -> dict[int, int]:
        """Returns the last applied sequence number by rank, for ranks that have one."""
        return self.index.sequences(worker.slots)

    async def rebuild(self, store: Store) -> Position:
        """Reloads the state while the old one serves queries; returns the position to follow from."""
        self._changes_during_load = []
        try:
            state = await store.load(self.model)
            # Earlier changes are in the loaded state or follow in the feed.
            self._changes_during_load = []
            for pending in self._pending_changes:
                pending.superseded = True
            for worker in state.workers:
                self._orphans.pop(worker.worker_id, None)
            index = await self._read(store, state.workers) if self._owns_index else self.index
        finally:
            changes, self._changes_during_load = self._changes_during_load, None
        old, self.index = self.index, index
        alive = {worker.worker_id for worker in state.workers}
        alive |= {change.worker.worker_id for change in changes if isinstance(change, WorkerUp)}
        missing = [worker for worker in self.workers if worker.worker_id not in alive]
        self._handle_missing(missing, old, data_lost=self._generation not in (None, state.generation))
        self._generation = state.generation
        for worker in state.workers:
            self._registry.up(worker)
        for change in changes:  # made here during the load, and perhaps not included in it
            self.apply(change)
        self.touch()
        self.loaded.set()
        return state.position

    def _handle_missing(self, missing: list[Worker], old: BlockIndex, data_lost: bool) -> None:
        """Removes workers that the store lacks; if it lost its data, keeps them until they register again."""
        for worker in missing:
            if not data_lost and worker.worker_id not in self._orphans:
                self._registry.down(self.model, worker.worker_id, worker.epoch)
                continue
            self._orphans.setdefault(worker.worker_id, (worker.epoch, time.monotonic()))
            for slot in worker.slots:
                self.index.open(slot, worker.epoch, worker.total_blocks)
                if (cache := old.cache(slot)) is not None:
                    self.index.replace(slot, cache.epoch, cache.snapshot(slot.rank))

    def drop_orphans(self, after_s: float) -> None:
        """Removes workers that did not register again within this time after the store lost its data."""
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
            for _ in index.fill(slot, epoch, snapshot, BYTES_AT_ONCE):
                await asyncio.sleep(0)  # the old state serves queries meanwhile

        await asyncio.gather(*(read(worker, slot) for worker in workers for slot in worker.slots))
        return index

    async def follow(self, store: Store, changes: Iterable[Change]) -> int:
        """Applies changes in order, reads ranks that the feed leaves incomplete and returns their number."""
        incomplete, work = set(), 0
        for change in changes:
            if self._pending_changes:
                self._supersede(change)
            if (slot := self.apply(change)) is not None:
                incomplete.add(slot)
            if isinstance(change, BlocksChanged):
                work += change.batch.bytes
            if work > BYTES_AT_ONCE:
                work = 0
                await asyncio.sleep(0)  # let queries run
        for slot in incomplete:
            found = await store.blocks(self.model, slot)
            if found is not None:
                self.index.replace(slot, *found)
        self.touch()
        return len(incomplete)

    @contextmanager
    def pending_change(self, worker_id: str) -> Iterator[PendingChange]:
        """Tracks a change of a worker sent to the store; apply it here afterwards unless it was superseded."""
        pending = PendingChange(worker_id)
        self._pending_changes.add(pending)
        try:
            yield pending
        finally:
            self._pending_changes.discard(pending)

    def _supersede(self, change: Change) -> None:
        match change:
            case WorkerUp(Worker(worker_id=worker_id)) | WorkerDraining(worker_id, _) | WorkerDown(worker_id, _):
                for pending in self._pending_changes:
                    pending.superseded |= pending.worker_id == worker_id

    def apply(self, change: Change) -> WorkerRank | None:
        """Applies one change; returns the rank whose blocks have to be read from the store, if any.

        Epochs and sequence numbers identify repeated and late changes.
        """
        if self._changes_during_load is not None:
            self._changes_during_load.append(change)
        incomplete = self._applied(change)
        if isinstance(change, BlocksChanged | BlocksReplaced):
            self._update_predictions(change)
        return incomplete

    def _update_predictions(self, change: BlocksChanged | BlocksReplaced) -> None:
        slot = change.slot
        for op in change.batch.ops if isinstance(change, BlocksChanged) else ():
            if op.kind is CacheOperation.CLEARED:
                self.predictions.drop_rank(slot)
                return
        self.predictions.drop_confirmed(slot, partial(self.index.holds, slot))

    def _applied(self, change: Change) -> WorkerRank | None:
        match change:
            case BlocksChanged() | BlocksReplaced() if not self._owns_index:
                pass
            case BlocksChanged(slot, epoch, batch):
                outcome = self.index.apply(slot, epoch, batch)
                return slot if outcome in (ApplyResult.GAP, ApplyResult.OVERFLOW) else None
            case BlocksReplaced(slot, epoch, sequence):
                cache = self.index.cache(slot)
                stale = cache is None or cache.epoch != epoch or cache.sequence > sequence
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
        """Sets the loads as last read; drops reports of removed workers."""
        self.loads = pulse.loads
        alive = {worker.worker_id for worker in self.workers}
        self.reports = {name: report for name, report in (self.reports | pulse.reports).items() if name in alive}

    def replace(self, slot: WorkerRank, epoch: int, snapshot: Snapshot) -> None:
        """Replaces a rank's blocks by a snapshot."""
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
            self.predictions.drop_rank(slot)
            self.loads.pop(slot, None)
        self.reports.pop(worker.worker_id, None)
