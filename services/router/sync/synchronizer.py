"""Keeps the views current: follows every model's changes, refreshes loads, clears what expired."""

from __future__ import annotations

import asyncio
import logging

from services.common.tasks import TaskOwner
from services.router.kv_index.predictions import Lifetimes, Predictions
from services.router.metrics import Metrics
from services.router.reservations.cost import Load
from services.router.store.base import FellBehind, Store, StoreUnavailable
from services.router.store.store_health import Link
from services.router.sync.load_reconciler import LoadReconciler
from services.router.sync.model_state import ModelState
from services.router.sync.reservation_manager import ReservationManager
from services.router.workers.registry import Registry
from services.router.workers.worker import WorkerRank

log = logging.getLogger(__name__)

TEND_EVERY_S = 0.5
REREAD_AFTER_S = 2.0  # what cannot be read now may not be readable the next moment either


class IndexSynchronizer:
    """Owns the views.

    Args:
        lease_ms: of workers. Nothing is swept until the store has been there for as long, so that workers whose router
            or store was away can renew first.
    """

    def __init__(
        self,
        store: Store,
        link: Link,
        bookkeeper: ReservationManager,
        registry: Registry,
        tasks: TaskOwner,
        metrics: Metrics,
        lease_ms: int,
        lifetimes: Lifetimes,
        drift: LoadReconciler,
    ) -> None:
        self._store = store
        self._link = link
        self._bookkeeper = bookkeeper
        self._registry = registry
        self._tasks = tasks
        self._metrics = metrics
        self._lease_s = lease_ms / 1000
        self._lifetimes = lifetimes
        self._drift = drift
        self._views: dict[str, ModelState] = {}
        self.known: set[str] = set()

    def view(self, model: str) -> ModelState:
        """The view of a model; made, and followed from now on, if there is none."""
        found = self._views.get(model)
        if found is None:
            found = self._views[model] = ModelState(
                model, self._registry, self._store.index(model), Predictions(self._lifetimes)
            )
            self._tasks.spawn(self._follow(found), f"follow-{model}")
        return found

    def find(self, model: str) -> ModelState | None:
        """The view of a model that has been heard of."""
        return self._views.get(model)

    @property
    def views(self) -> list[ModelState]:
        """All of them, by model."""
        return [self._views[model] for model in sorted(self._views)]

    async def booked(self, view: ModelState) -> dict[WorkerRank, Load]:
        """Booked loads, live while the store is there."""
        if self._link.there:
            try:
                view.take(await self._store.pulse(view.model))
            except StoreUnavailable as error:
                self._link.lost(error)
        return view.loads

    async def discover(self) -> None:
        """Learns which models the store knows, and starts following them."""
        self.known = set(await self._store.models())
        for model in self.known:
            self.view(model)

    async def load_all(self) -> None:
        """Waits until every known model has been read once."""
        await self._link.wait()
        await asyncio.gather(*(view.loaded.wait() for view in self.views))

    async def tend(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._link.wait()
            try:
                await self._tend_once()
            except StoreUnavailable as error:
                self._link.lost(error)
            await asyncio.sleep(TEND_EVERY_S)

    async def _tend_once(self) -> None:
        await self._bookkeeper.settle()
        await self.discover()
        for view in self.views:
            view.predictions.tidy()
            view.drop_orphans(self._lease_s)
            if self._link.there_for_s > self._lease_s:
                await self._store.sweep(view.model)
            view.take(await self._store.pulse(view.model))
            await self._drift.correct(view)

    async def _follow(self, view: ModelState) -> None:
        reason = "start"
        while True:
            since = await self._link.wait()
            try:
                self._metrics.reloads.add(1, {"reason": reason})
                position = await view.rebuild(self._store)
                async for changes in self._store.follow(view.model, position):
                    # Others may find the store away when this reader does not, and then change the view without it.
                    if not self._link.unbroken(since):
                        reason = "store_returned"
                        break
                    await view.follow(self._store, changes)
            except FellBehind:
                reason = "fell_behind"
                log.warning("fell behind the change feed; reading the store anew", extra={"model": view.model})
            except StoreUnavailable as error:
                reason = "store_returned"
                self._link.lost(error)
            except Exception:  # whatever the store holds, the other models are served, and this one as last known
                reason = "other"
                log.exception("following a model failed; reading the store anew soon", extra={"model": view.model})
                await asyncio.sleep(REREAD_AFTER_S)
