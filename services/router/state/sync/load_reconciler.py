"""Releases reservations early when the load reports of workers show that their requests have ended.

The worker received the request of an old reservation long before its last report. So if a rank reports fewer requests
than it has old reservations, the difference has ended without being freed; and if it reports no pending prompts, the
prompts of its old reservations are computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from services.router.metrics import Metrics
from services.router.state.store.base import Store
from services.router.state.sync.model_state import ModelState
from services.router.state.workers.worker import WorkerRank

log = logging.getLogger(__name__)


class Reported(NamedTuple):
    """Reported load of a rank.

    Attributes:
        requests: those that wait or run.
        prompts_wait: whether prompts wait for computation.
        used_blocks: KV blocks in use.
    """

    requests: int = 0
    prompts_wait: bool = False
    used_blocks: int = 0


ReadReport: TypeAlias = Callable[[bytes], Sequence[Reported]]
"""Parses a report as the transport encodes it; returns the load by rank."""


class Reports:
    """The last load reports of workers; parses each once."""

    def __init__(self, read: ReadReport) -> None:
        self._read = read
        self._parsed: dict[str, dict[str, tuple[bytes, dict[WorkerRank, Reported]]]] = {}

    def by_rank(self, view: ModelState) -> Mapping[WorkerRank, Reported]:
        """Returns the reported load of the ranks of a model, for those that have reported."""
        before = self._parsed.get(view.model, {})
        now: dict[str, tuple[bytes, dict[WorkerRank, Reported]]] = {}
        for worker_id, report in view.reports.items():
            known = before.get(worker_id)
            if known is None or known[0] != report:
                known = report, {WorkerRank(worker_id, rank): load for rank, load in enumerate(self._read(report))}
            now[worker_id] = known
        self._parsed[view.model] = now
        return {slot: load for _, ranks in now.values() for slot, load in ranks.items()}


class LoadReconciler:
    """Reconciles reserved with reported loads. All replicas may do so, because corrections are idempotent.

    Args:
        after_s: age from which a reservation must appear in its worker's reports. Must exceed two heartbeats and the
            time that a caller takes to send the request of a reservation.
        now_s: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        store: Store,
        reports: Reports,
        metrics: Metrics,
        after_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._reports = reports
        self._metrics = metrics
        self._after_s = after_s
        self._now_s = now_s
        self._since: dict[tuple[str, WorkerRank], float] = {}

    async def correct(self, view: ModelState) -> None:
        """Corrects the loads of one model, as last read; raises StoreUnavailable if the store cannot be reached."""
        suspects = dict(self._suspects(view))
        now = self._now_s()
        for key in [key for key in self._since if key[0] == view.model and key[1] not in suspects]:
            del self._since[key]
        for slot, reported in suspects.items():
            if now - self._since.setdefault((view.model, slot), now) < self._after_s:
                continue  # no reservation can be old enough before
            del self._since[view.model, slot]
            ended, computed = await self._store.correct(
                view.model, slot, reported.requests, int(self._after_s * 1000), not reported.prompts_wait
            )
            self._record(view.model, slot, ended, computed)

    def _suspects(self, view: ModelState) -> list[tuple[WorkerRank, Reported]]:
        """Returns the ranks with more load reserved than reported."""
        suspects = []
        for slot, reported in self._reports.by_rank(view).items():
            load = view.loads.get(slot)
            if load is None:
                continue
            if load.requests > reported.requests or (load.prefill > 0 and not reported.prompts_wait):
                suspects.append((slot, reported))
        return suspects

    def _record(self, model: str, slot: WorkerRank, ended: int, computed: int) -> None:
        if ended:
            self._metrics.expired.add(ended, {"why": "not_on_worker"})
            log.info(
                "released reservations that are not on their worker",
                extra={"model": model, "worker": slot.worker_id, "rank": slot.rank, "reservations": ended},
            )
        if computed:
            self._metrics.prefill_inferred.add(computed)
