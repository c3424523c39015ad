"""Which workers are there, and who wants to hear about it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from enum import Enum
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from services.router.workers.worker import Worker

_by_id = attrgetter("worker_id")


class Happening(Enum):
    """What a watcher hears."""

    UP = "up"
    DOWN = "down"
    SYNCED = "synced"


class News(NamedTuple):
    """One thing a watcher hears; `worker` is None with SYNCED."""

    happening: Happening
    worker: Worker | None


class Watch:
    """News for one watcher. Of one worker only the latest is kept, so a slow watcher costs a bounded amount."""

    def __init__(self, model: str, alive: list[Worker]) -> None:
        self.model = model
        self._pending: dict[tuple[str, str], News] = {}
        self._first = [*(News(Happening.UP, worker) for worker in alive), News(Happening.SYNCED, None)]
        self._ready = asyncio.Event()
        self._ready.set()
        self.ended = False

    def end(self) -> None:
        """No more news will come."""
        self.ended = True
        self._ready.set()

    def tell(self, happening: Happening, worker: Worker) -> None:
        """Adds news."""
        key = (worker.model, worker.worker_id)
        self._pending.pop(key, None)  # the latest news is also the last in order
        self._pending[key] = News(happening, worker)
        self._ready.set()

    async def next(self) -> list[News]:
        """Waits for news and takes them; after the end there may be none."""
        await self._ready.wait()
        if not self.ended:
            self._ready.clear()
        news, self._first = [*self._first, *self._pending.values()], []
        self._pending.clear()
        return news


class Registry:
    """The workers this replica knows, of all models."""

    def __init__(self) -> None:
        self._workers: dict[str, dict[str, Worker]] = {}
        self._in_order: dict[str, list[Worker]] = {}  # by id; of the models that were asked for since they changed
        self._watches: set[Watch] = set()

    def get(self, model: str, worker_id: str) -> Worker | None:
        """One worker, draining or not."""
        return self._workers.get(model, {}).get(worker_id)

    def workers(self, model: str = "") -> list[Worker]:
        """Workers of one or all models, draining ones included, by id."""
        if not model:
            return sorted(chain.from_iterable(map(dict.values, self._workers.values())), key=_by_id)
        if model not in self._in_order:
            if model not in self._workers:
                return []
            self._in_order[model] = sorted(self._workers[model].values(), key=_by_id)
        return self._in_order[model].copy()

    def models(self) -> list[str]:
        """Models that have workers, by name."""
        return sorted(model for model, group in self._workers.items() if group)

    def up(self, worker: Worker) -> None:
        """A worker is there, new or changed."""
        group = self._workers.setdefault(worker.model, {})
        if group.get(worker.worker_id) == worker:
            return
        group[worker.worker_id] = worker
        self._in_order.pop(worker.model, None)
        self._tell(Happening.DOWN if worker.draining else Happening.UP, worker)

    def drain(self, model: str, worker_id: str, epoch: int) -> None:
        """A worker takes no new requests."""
        worker = self.get(model, worker_id)
        if worker is not None and worker.epoch == epoch and not worker.draining:
            draining = self._workers[model][worker_id] = replace(worker, draining=True)
            self._in_order.pop(model, None)
            self._tell(Happening.DOWN, draining)

    def down(self, model: str, worker_id: str, epoch: int) -> Worker | None:
        """A worker is gone; returns it if it was there with this epoch."""
        worker = self.get(model, worker_id)
        if worker is None or worker.epoch != epoch:
            return None
        del self._workers[model][worker_id]
        self._in_order.pop(model, None)
        if not self._workers[model]:
            del self._workers[model]
        if not worker.draining:  # of a draining one, watchers have heard
            self._tell(Happening.DOWN, worker)
        return worker

    def watch(self, model: str = "") -> Watch:
        """Starts a watch; end it with `unwatch`."""
        watch = Watch(model, [worker for worker in self.workers(model) if not worker.draining])
        self._watches.add(watch)
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Ends a watch."""
        self._watches.discard(watch)

    def close(self) -> None:
        """Ends all watches."""
        for watch in self._watches:
            watch.end()

    def _tell(self, happening: Happening, worker: Worker) -> None:
        for watch in self._watches:
            if not watch.model or watch.model == worker.model:
                watch.tell(happening, worker)
