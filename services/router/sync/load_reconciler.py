"""Corrects the load book by what workers say of themselves: what they cannot have any more is given back early.

A reservation that is old enough was sent to its worker long before the worker's last report. So if the rank reports
fewer requests than there are old reservations on it, the difference is over and nobody freed it; and if it reports no
prompt to compute, theirs are computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from services.router.metrics import Metrics
from services.router.store.base import Store
from services.router.sync.model_state import ModelState
from services.router.workers.worker import WorkerRank

log = logging.getLogger(__name__)


class Reported(NamedTuple):
    """What a rank says of itself: requests it has, waiting or running, and whether prompts wait for computation."""

    requests: int
    prompts_wait: bool


ReadReport: TypeAlias = Callable[[bytes], Sequence[Reported]]
"""By rank, out of a report as the transport encodes it."""


class LoadReconciler:
    """Any replica may correct: the store looks again, so that doing it twice is doing it once.

    Args:
        after_s: age from which a reservation must show in its worker's reports. Must be longer than a caller takes to
            send a request that it booked, and than two heartbeats.
        now_s: seconds of any clock that does not go back.
    """

    def __init__(
        self,
        store: Store,
        read: ReadReport,
        metrics: Metrics,
        after_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._read = read
        self._metrics = metrics
        self._after_s = after_s
        self._now_s = now_s
        self._since: dict[tuple[str, WorkerRank], float] = {}

    async def correct(self, view: ModelState) -> None:
        """Looks at one model's loads as last read; StoreUnavailable when the store is away."""
        suspects = dict(self._suspects(view))
        now = self._now_s()
        for key in [key for key in self._since if key[0] == view.model and key[1] not in suspects]:
            del self._since[key]
        for slot, reported in suspects.items():
            if now - self._since.setdefault((view.model, slot), now) < self._after_s:
                continue  # it takes as long until anything is old enough
            del self._since[view.model, slot]
            ended, computed = await self._store.correct(
                view.model, slot, reported.requests, int(self._after_s * 1000), not reported.prompts_wait
            )
            self._note(view.model, slot, ended, computed)

    def _suspects(self, view: ModelState) -> list[tuple[WorkerRank, Reported]]:
        """Ranks on which more is booked than they report."""
        found = []
        for worker_id, report in view.reports.items():
            for rank, reported in enumerate(self._read(report)):
                slot = WorkerRank(worker_id, rank)
                load = view.loads.get(slot)
                if load is None:
                    continue
                if load.requests > reported.requests or (load.prefill > 0 and not reported.prompts_wait):
                    found.append((slot, reported))
        return found

    def _note(self, model: str, slot: WorkerRank, ended: int, computed: int) -> None:
        if ended:
            self._metrics.expired.add(ended, {"why": "not_on_worker"})
            log.info(
                "gave back reservations that their worker has not",
                extra={"model": model, "worker": slot.worker_id, "rank": slot.rank, "reservations": ended},
            )
        if computed:
            self._metrics.prefill_inferred.add(computed)
