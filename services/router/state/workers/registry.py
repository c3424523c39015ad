"""Registry of the known workers, and watches on its changes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from enum import Enum
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from services.router.state.workers.worker import Worker

RETURN_S = 1.0
"""Seconds for which requests of a model wait for its last workers to return after their connections were lost."""

_by_id = attrgetter("worker_id")


class UpdateKind(Enum):
    """Kind of a worker update."""

    UP = "up"
    DOWN = "down"
    SYNCED = "synced"


class WorkerUpdate(NamedTuple):
    """Update sent to a watcher; `worker` is None for SYNCED."""

    kind: UpdateKind
    worker: Worker | None


class Watch:
    """Pending updates for one watcher; only the latest of each worker, so that a slow watcher uses bounded memory.

    Args:
        workers: those of the model now: the ones that accept requests are sent first, then those that are set aside.
    """

    def __init__(self, model: str, workers: list[Worker]) -> None:
        self.model = model
        self._pending: dict[tuple[str, str], WorkerUpdate] = {}
        self._first = [
            *(WorkerUpdate(UpdateKind.UP, worker) for worker in workers if worker.accepts),
            *(WorkerUpdate(UpdateKind.DOWN, worker) for worker in workers if worker.set_aside),
            WorkerUpdate(UpdateKind.SYNCED, None),
        ]
        self._ready = asyncio.Event()
        self._ready.set()
        self.ended = False

    def end(self) -> None:
        """Ends the watch: no more updates follow."""
        self.ended = True
        self._ready.set()

    def add(self, kind: UpdateKind, worker: Worker) -> None:
        """Adds an update."""
        key = (worker.model, worker.worker_id)
        self._pending.pop(key, None)  # the latest update moves to the end
        self._pending[key] = WorkerUpdate(kind, worker)
        self._ready.set()

    async def next(self) -> list[WorkerUpdate]:
        """Waits for updates and returns them; may return an empty list after the end."""
        await self._ready.wait()
        if not self.ended:
            self._ready.clear()
        updates, self._first = [*self._first, *self._pending.values()], []
        self._pending.clear()
        return updates


class Registry:
    """Workers of all models known to this replica."""

    def __init__(self) -> None:
        self._workers: dict[str, dict[str, Worker]] = {}
        # Caches, dropped when a model changes: its workers by id, and those that accept requests.
        self._in_order: dict[str, list[Worker]] = {}
        self._serving: dict[str, tuple[Worker, ...]] = {}
        self._watches: set[Watch] = set()
        self._lost: dict[str, float] = {}  # model → when the last worker that accepted requests was lost

    def get(self, model: str, worker_id: str) -> Worker | None:
        """Returns a worker, draining or not; None if it is unknown."""
        return self._workers.get(model, {}).get(worker_id)

    def workers(self, model: str = "") -> list[Worker]:
        """Returns the workers of one model (empty: of all models) ordered by id, including draining ones."""
        if not model:
            return sorted(chain.from_iterable(map(dict.values, self._workers.values())), key=_by_id)
        if model not in self._in_order:
            if model not in self._workers:
                return []
            self._in_order[model] = sorted(self._workers[model].values(), key=_by_id)
        return self._in_order[model].copy()

    def serving(self, model: str) -> tuple[Worker, ...]:
        """Returns the workers of one model that accept requests, ordered by id; the same tuple until one changes."""
        found = self._serving.get(model)
        if found is None:
            found = tuple(worker for worker in self.workers(model) if worker.accepts)
            if found:
                self._serving[model] = found
        return found

    def returning_ms(self, model: str) -> int:
        """Returns for how many milliseconds a model's last workers, which did not announce to leave, may return."""
        lost_at = self._lost.get(model)
        return 0 if lost_at is None else max(0, int((lost_at + RETURN_S - time.monotonic()) * 1000))

    def models(self) -> list[str]:
        """Returns the sorted names of the models that have workers."""
        return sorted(model for model, group in self._workers.items() if group)

    def up(self, worker: Worker) -> None:
        """Adds or updates a worker."""
        group = self._workers.setdefault(worker.model, {})
        if group.get(worker.worker_id) == worker:
            return
        group[worker.worker_id] = worker
        self._changed(worker.model)
        self._notify(UpdateKind.UP if worker.accepts else UpdateKind.DOWN, worker)

    def drain(self, model: str, worker_id: str, epoch: int) -> None:
        """Marks a worker as draining."""
        worker = self.get(model, worker_id)
        if worker is not None and worker.epoch == epoch and not worker.draining:
            draining = self._workers[model][worker_id] = replace(worker, draining=True)
            self._changed(model)
            self._notify(UpdateKind.DOWN, draining)

    def down(self, model: str, worker_id: str, epoch: int) -> Worker | None:
        """Removes a worker and returns it; None unless it was registered with this epoch."""
        worker = self.get(model, worker_id)
        if worker is None or worker.epoch != epoch:
            return None
        del self._workers[model][worker_id]
        self._changed(model)
        if not self._workers[model]:
            del self._workers[model]
        if worker.accepts or worker.set_aside:  # else watchers were notified when that began
            self._notify(UpdateKind.DOWN, replace(worker, set_aside=""))
        if worker.accepts and not self.serving(model):
            self._note_lost(model)
        return worker

    def _note_lost(self, model: str) -> None:
        now = time.monotonic()
        self._lost = {name: lost_at for name, lost_at in self._lost.items() if lost_at + RETURN_S > now} | {model: now}

    def watch(self, model: str = "") -> Watch:
        """Starts a watch of one model, or of all models for an empty name; end it with `unwatch`."""
        watch = Watch(model, self.workers(model))
        self._watches.add(watch)
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Ends a watch."""
        self._watches.discard(watch)

    def close(self) -> None:
        """Ends all watches."""
        for watch in self._watches:
            watch.end()

    def _changed(self, model: str) -> None:
        self._in_order.pop(model, None)
        self._serving.pop(model, None)

    def _notify(self, kind: UpdateKind, worker: Worker) -> None:
        for watch in self._watches:
            if not watch.model or watch.model == worker.model:
                watch.add(kind, worker)
