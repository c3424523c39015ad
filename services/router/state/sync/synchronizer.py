"""Keeps model states current: follows change feeds, refreshes loads, removes expired entries."""

from __future__ import annotations

import asyncio
import logging

from services.common.base.shared_steps import shared_step
from services.common.base.tasks import TaskOwner
from services.router.metrics import Metrics
from services.router.state.kv_index.predictions import Lifetimes, Predictions
from services.router.state.reservations.cost import Load
from services.router.state.store.base import FellBehind, Store, StoreUnavailable
from services.router.state.store.store_health import StoreHealth
from services.router.state.sync.load_reconciler import LoadReconciler
from services.router.state.sync.model_state import ModelState
from services.router.state.sync.reservation_manager import ReservationManager
from services.router.state.workers.registry import Registry
from services.router.state.workers.worker import WorkerRank

log = logging.getLogger(__name__)

TEND_EVERY_S = 0.5
REREAD_AFTER_S = 2.0  # pause after an unexpected error, which an immediate retry would likely repeat


class IndexSynchronizer:
    """Owns the model states.

    Args:
        lease_ms: of workers. Nothing is swept until the store has been available for this long, so that workers can
            renew first after an outage of the store or of their router.
    """

    def __init__(
        self,
        store: Store,
        health: StoreHealth,
        reservations: ReservationManager,
        registry: Registry,
        tasks: TaskOwner,
        metrics: Metrics,
        lease_ms: int,
        lifetimes: Lifetimes,
        reconciler: LoadReconciler,
    ) -> None:
        self._store = store
        self._health = health
        self._reservations = reservations
        self._registry = registry
        self._tasks = tasks
        self._metrics = metrics
        self._lease_s = lease_ms / 1000
        self._lifetimes = lifetimes
        self._reconciler = reconciler
        self._views: dict[str, ModelState] = {}
        self.known: set[str] = set()

    def view(self, model: str) -> ModelState:
        """Returns the state of a model; creates it and starts to follow its feed if needed."""
        found = self._views.get(model)
        if found is None:
            found = self._views[model] = ModelState(
                model, self._registry, self._store.index(model), Predictions(self._lifetimes)
            )
            self._tasks.spawn(self._follow(found), f"follow-{model}")
        return found

    def find(self, model: str) -> ModelState | None:
        """Returns the state of a model; None if the model is unknown."""
        return self._views.get(model)

    @property
    def views(self) -> list[ModelState]:
        """All model states, ordered by model."""
        return [self._views[model] for model in sorted(self._views)]

    async def booked(self, view: ModelState) -> dict[WorkerRank, Load]:
        """Returns the reserved loads, current while the store is available."""
        if self._health.available:
            try:
                view.take(await self._store.pulse(view.model))
            except StoreUnavailable as error:
                self._health.mark_unavailable(error)
        return view.loads

    async def discover(self) -> None:
        """Starts to follow all models in the store."""
        self.known = set(await self._store.models())
        for model in self.known:
            self.view(model)

    async def load_all(self) -> None:
        """Waits until the state of every known model has been loaded."""
        await self._health.wait()
        await asyncio.gather(*(view.loaded.wait() for view in self.views))

    async def tend(self) -> None:
        """Refreshes loads and removes expired entries periodically until cancelled."""
        while True:
            await self._health.wait()
            try:
                await self._tend_once()
            except StoreUnavailable as error:
                self._health.mark_unavailable(error)
            await asyncio.sleep(TEND_EVERY_S)

    @shared_step("router.tend")
    async def _tend_once(self) -> None:
        await self._reservations.replay_local()
        await self.discover()
        for view in self.views:
            try:
                await self._tend_model(view)
            except StoreUnavailable:
                raise
            except Exception:  # invalid data must not affect other models
                log.exception("tending a model failed", extra={"model": view.model})

    async def _tend_model(self, view: ModelState) -> None:
        view.predictions.drop_expired()
        view.drop_orphans(self._lease_s)
        if self._health.available_for_s > self._lease_s:
            await self._store.sweep(view.model, int(1000 * self._lease_s))
        view.take(await self._store.pulse(view.model))
        await self._reconciler.correct(view)

    async def _follow(self, view: ModelState) -> None:
        reason = "start"
        while True:
            since = await self._health.wait()
            try:
                self._metrics.reloads.add(1, {"reason": reason})
                position = await view.rebuild(self._store)
                async for changes in self._store.follow(view.model, position):
                    # Other callers may find the store unavailable when this reader does not, and change the state
                    # locally.
                    if not self._health.uninterrupted(since):
                        reason = "store_returned"
                        break
                    await view.follow(self._store, changes)
            except FellBehind:
                reason = "fell_behind"
                log.warning("fell behind the change feed; reloading from the store", extra={"model": view.model})
            except StoreUnavailable as error:
                reason = "store_returned"
                self._health.mark_unavailable(error)
            except Exception:  # invalid data must not affect other models; this one is served as last loaded
                reason = "other"
                log.exception("following a model failed; reloading from the store", extra={"model": view.model})
                await asyncio.sleep(REREAD_AFTER_S)
