"""What one replica knows: workers, model states and reservations, and the store that they are kept in step with."""

from __future__ import annotations

from random import Random

from services.common.base.tasks import TaskOwner
from services.router.metrics import Metrics
from services.router.state.kv_index.predictions import Lifetimes
from services.router.state.store.base import Store
from services.router.state.store.store_health import StoreHealth
from services.router.state.sync.load_reconciler import LoadReconciler, ReadReport, Reports
from services.router.state.sync.reservation_manager import ReservationManager
from services.router.state.sync.reservation_owners import Owners
from services.router.state.sync.synchronizer import IndexSynchronizer
from services.router.state.workers.registry import Registry


class Replica:
    """The state of a replica, made of parts that know each other.

    Args:
        lease_ms: of workers.
        drift_after_s: age from which a reservation must appear in its worker's reports.
    """

    def __init__(
        self,
        store: Store,
        random: Random,
        metrics: Metrics,
        tasks: TaskOwner,
        read_report: ReadReport,
        *,
        lease_ms: int,
        owner_lease_ms: int,
        drift_after_s: float,
        lifetimes: Lifetimes,
    ) -> None:
        self.store = store
        self.metrics = metrics
        self.tasks = tasks
        self.lease_ms = lease_ms
        self.health = StoreHealth(store)
        self.registry = Registry()
        self.reports = Reports(read_report)
        self.reservations = ReservationManager(store, self.health, random)
        reconciler = LoadReconciler(store, self.reports, metrics, drift_after_s)
        self.synchronizer = IndexSynchronizer(
            store, self.health, self.reservations, self.registry, tasks, metrics, lease_ms, lifetimes, reconciler
        )
        self.owners = Owners(store, self.health, self.synchronizer, metrics, owner_lease_ms)
