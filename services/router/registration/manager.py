"""The workers attached to this replica."""

from __future__ import annotations

import logging
import time
from functools import lru_cache

from services.common.tasks import TaskOwner
from services.router.metrics import Metrics
from services.router.registration.stream import WorkerStream
from services.router.store.base import Store
from services.router.store.store_health import Link
from services.router.sync.reservation_manager import ReservationManager
from services.router.sync.synchronizer import IndexSynchronizer
from services.router.workers.claims import Claim, Taken
from services.router.workers.worker import Worker

log = logging.getLogger(__name__)

LOG_AGAIN_S = 60.0


class WorkerManager:
    """Attaches and detaches workers, and brings a returning store up to date about them."""

    def __init__(
        self,
        store: Store,
        link: Link,
        keeper: IndexSynchronizer,
        bookkeeper: ReservationManager,
        tasks: TaskOwner,
        metrics: Metrics,
        lease_ms: int,
    ) -> None:
        self._store = store
        self._link = link
        self._keeper = keeper
        self._bookkeeper = bookkeeper
        self._tasks = tasks
        self._metrics = metrics
        self._lease_ms = lease_ms
        self._attachments: dict[tuple[str, str], WorkerStream] = {}
        self._untold: list[WorkerStream] = []
        self._stopping = False

    async def attach(self, worker: Worker, proof: str = "") -> tuple[WorkerStream, dict[int, int]]:
        """Registers a worker; returns its attachment and the last sequence number held, by rank.

        Args:
            proof: what proved the worker's identity, for logs.

        Raises:
            SluiceError: FAILED_PRECONDITION (`worker_id_taken`) when another process holds the worker's id; otherwise
                as WorkerStream.open.
        """
        view = self._keeper.view(worker.model)
        attachment = WorkerStream(worker, self._store, self._link, view, self._lease_ms, proof, self._check_here)
        try:
            sequences = await attachment.open()
        except Taken as taken:
            _log_taken(worker.worker_id, proof, taken.holder.proof, int(time.monotonic() // LOG_AGAIN_S))
            raise taken.error from None
        self._keeper.known.add(worker.model)
        self._attachments[worker.model, worker.worker_id] = attachment
        self._metrics.workers.add(1)
        log.info("worker attached", extra={"worker": worker.worker_id, "model": worker.model, "epoch": worker.epoch})
        return attachment, sequences

    def _check_here(self, claim: Claim) -> None:
        """While the store is away: raises Taken for the ids of workers attached here, and for those of workers attached
        elsewhere as long as the leases last that their routers can have renewed."""
        left_ms = self._lease_ms - int(self._link.away_for_s * 1000)
        known = [attachment.worker for attachment in self._attachments.values()]
        if left_ms > 0:
            known += [worker for view in self._keeper.views if (worker := view.find(claim.worker_id)) is not None]
        for worker in known:
            if worker.worker_id == claim.worker_id and not claim.may_replace(worker.claim):
                raise Taken(left_ms if left_ms > 0 else self._lease_ms, worker.claim)

    def detach(self, attachment: WorkerStream) -> None:
        """A worker's stream ended: it is gone. While this router stops, its workers attach to another replica."""
        worker = attachment.worker
        key = (worker.model, worker.worker_id)
        self._metrics.workers.add(-1)
        if self._attachments.get(key) is not attachment:
            return
        del self._attachments[key]
        if self._stopping:
            return
        log.info("worker detached", extra={"worker": worker.worker_id, "model": worker.model})
        if not attachment.left:
            self._bookkeeper.drop_worker(worker.model, worker.worker_id)
        self._tasks.spawn(self._tell(attachment), f"remove-{worker.worker_id}")

    def stop(self) -> None:
        """From now on the end of a stream does not mean the end of its worker."""
        self._stopping = True

    async def recover(self) -> None:
        """Tells the store which workers are here; StoreUnavailable when it is away again."""
        for key, attachment in list(self._attachments.items()):
            if self._attachments.get(key) is attachment:  # else it went meanwhile
                await attachment.reopen()

    async def take_leave(self) -> None:
        """Tells the store which workers went while it was away, up to this moment; StoreUnavailable when it is away
        again."""
        while self._untold:
            await self._untold[0].remove()
            del self._untold[0]

    async def _tell(self, attachment: WorkerStream) -> None:
        if not await attachment.close():
            self._untold.append(attachment)


@lru_cache(maxsize=1_024)  # once a minute for each pair: a refused worker tries again and again
def _log_taken(worker_id: str, refused: str, holder: str, minute: int) -> None:
    log.warning(
        "a registration is refused: another process holds the worker id",
        extra={"worker": worker_id, "refused": refused or "anonymous", "holder": holder or "anonymous"},
    )
