"""Manages the workers attached to this replica."""

from __future__ import annotations

import logging
import time
from functools import lru_cache
from itertools import chain

from services.common.base.budgets import Budget
from services.common.base.shared_steps import shared_step
from services.router.registration.limits import MAX_MODELS, RegistrationLimits
from services.router.registration.stream import WorkerStream
from services.router.state.store.base import StoreUnavailable
from services.router.state.sync.replica import Replica
from services.router.state.workers.claims import Claim, Taken
from services.router.state.workers.worker import Worker

log = logging.getLogger(__name__)

LOG_AGAIN_S = 60.0


class WorkerManager:
    """Attaches and detaches workers, and registers them again when the store returns."""

    def __init__(self, replica: Replica, max_models: int = MAX_MODELS, pin_ms: int = 0) -> None:
        self._store = replica.store
        self._health = replica.health
        self._synchronizer = replica.synchronizer
        self._reservations = replica.reservations
        self._tasks = replica.tasks
        self._metrics = replica.metrics
        self._lease_ms = replica.lease_ms
        self._pin_ms = pin_ms
        self._attachments: dict[tuple[str, str], WorkerStream] = {}
        self._departed: list[WorkerStream] = []
        self._limits = RegistrationLimits(Budget("worker_models", max_models, ""))
        self._stopping = False

    async def attach(self, worker: Worker, proof: str = "") -> tuple[WorkerStream, dict[int, int]]:
        """Registers a worker; returns its stream and the last applied sequence number by rank.

        Args:
            proof: credential and host of the worker, for logs.

        Raises:
            SluiceError: FAILED_PRECONDITION (`worker_id_taken`) if another process holds the worker id; as raised by
                RegistrationLimits.check and WorkerStream.open.
        """
        self._limits.check(worker, chain.from_iterable(view.workers for view in self._synchronizer.views))
        view = self._synchronizer.view(worker.model)
        attachment = WorkerStream(
            worker, self._store, self._health, view, self._lease_ms, proof, self._check_here, self._pin_ms
        )
        try:
            sequences = await attachment.open()
        except Taken as taken:
            _log_taken(worker.worker_id, proof, taken.holder.proof, int(time.monotonic() // LOG_AGAIN_S))
            raise taken.error from None
        self._synchronizer.known.add(worker.model)
        self._attachments[worker.model, worker.worker_id] = attachment
        self._metrics.workers.add(1)
        log.info("worker attached", extra={"worker": worker.worker_id, "model": worker.model, "epoch": worker.epoch})
        return attachment, sequences

    def _check_here(self, claim: Claim) -> None:
        """Raises Taken for ids held by other processes, as far as known without the store.

        These are workers attached here, and workers attached elsewhere whose leases cannot have expired yet.
        """
        left_ms = self._lease_ms - int(self._health.unavailable_for_s * 1000)
        known = [attachment.worker for attachment in self._attachments.values()]
        if left_ms > 0:
            known += [worker for view in self._synchronizer.views if (worker := view.find(claim.worker_id)) is not None]
        for worker in known:
            if worker.worker_id == claim.worker_id and not claim.may_replace(worker.claim):
                raise Taken(left_ms if left_ms > 0 else self._lease_ms, worker.claim)

    def detach(self, attachment: WorkerStream) -> None:
        """Removes a worker whose stream ended, unless this router is stopping and its workers reconnect elsewhere."""
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
            self._reservations.drop_worker(worker.model, worker.worker_id)
        self._tasks.spawn(self._close(attachment), f"remove-{worker.worker_id}")

    def stop(self) -> None:
        """Keeps workers registered from now on when their streams end."""
        self._stopping = True

    @shared_step("router.recover")
    async def recover(self) -> None:
        """Registers the attached workers again; raises StoreUnavailable if the store cannot be reached."""
        for key, attachment in list(self._attachments.items()):
            if self._attachments.get(key) is attachment:  # not detached meanwhile
                try:
                    await attachment.reopen()
                except StoreUnavailable:
                    raise
                except Exception as error:  # the other workers register all the same
                    attachment.refuse(error)

    async def remove_departed(self) -> None:
        """Removes the workers from the store that detached during its outage; raises StoreUnavailable if it fails."""
        while self._departed:
            await self._departed[0].remove()
            del self._departed[0]

    async def _close(self, attachment: WorkerStream) -> None:
        if not await attachment.close():
            self._departed.append(attachment)


@lru_cache(maxsize=1_024)  # logs each pair once a minute, because rejected workers retry
def _log_taken(worker_id: str, refused: str, holder: str, minute: int) -> None:
    log.warning(
        "registration rejected: another process holds the worker id",
        extra={"worker": worker_id, "refused": refused or "anonymous", "holder": holder or "anonymous"},
    )
