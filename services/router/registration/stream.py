"""Stream of an attached worker: its lease, event batches and resyncs."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.router.registration.joining import MESSAGES, check_block_size, reason_to_set_aside
from services.router.registration.name_pins import NamePin
from services.router.registration.stream_messages import (
    FloodGuard,
    Leaving,
    LoadReport,
    Replies,
    SnapshotChunk,
    WorkerMessage,
    hashes_of,
)
from services.router.state.kv_index.events import (
    HASH_BYTES,
    MAX_SEQUENCE,
    BlocksChanged,
    EventBatch,
    Snapshot,
    WorkerDown,
    WorkerDraining,
    WorkerUp,
)
from services.router.state.kv_index.rank_cache import ApplyResult
from services.router.state.store.base import Applied, Lease, Store, StoreUnavailable
from services.router.state.store.store_health import StoreHealth
from services.router.state.sync.model_state import ModelState
from services.router.state.workers.claims import Claim, Hold, Taken
from services.router.state.workers.worker import Worker, WorkerRank

log = logging.getLogger(__name__)

MAX_BUFFERED = 4_096
"""Batches of one rank kept until its snapshot arrives; with more, a new snapshot is requested."""
HEARTBEATS_PER_LEASE = 3
JOIN_EVERY_S = 1.0


@dataclass(slots=True)
class _Assembly:
    """A partially received snapshot, and the batches received after it was requested."""

    sequence: int = 0
    tiers: tuple[bytearray, bytearray, bytearray] = field(
        default_factory=lambda: (bytearray(), bytearray(), bytearray())
    )
    later: list[EventBatch] = field(default_factory=list)


class WorkerStream:
    """Handles the messages of a worker attached to this replica. Not reentrant: handle one batch of messages at a time.

    Args:
        proof: credential and host of the worker, for logs.
        check_here: raises Taken if another process holds the worker id as far as known without the store; called while
            the store is unavailable.
        pin_ms: how long the model's name stays pinned to its tokenizer, as in NamePin.
    """

    def __init__(
        self,
        worker: Worker,
        store: Store,
        health: StoreHealth,
        view: ModelState,
        lease_ms: int,
        proof: str = "",
        check_here: Callable[[Claim], None] = lambda claim: None,
        pin_ms: int = 0,
    ) -> None:
        self.worker = worker
        self._claim = replace(worker.claim, proof=proof)
        self._check_here = check_here
        self.session = uuid.uuid4().hex
        self.left = False
        self._unstored: set[int] = set()  # ranks with events that the store lacks
        self._refused: SluiceError | None = None
        self._store = store
        self._health = health
        self._view = view
        self._lease_ms = lease_ms
        self._pin = NamePin(store, health, pin_ms)
        self._renewed_at = self._join_at = 0.0
        self._flood = FloodGuard(worker)
        self._received: dict[int, int] = {}  # last sequence number received by rank
        self._assemblies: dict[int, _Assembly] = {}

    async def open(self) -> dict[int, int]:
        """Registers the worker; returns the last applied sequence number by rank.

        Raises:
            Taken: another process holds the worker id.
            SluiceError: FAILED_PRECONDITION for an old epoch, or a block size that differs from the model's.
        """
        check_block_size(self.worker, self._view.workers)
        await self._pin.read(self.worker)
        self._join()
        await self._pin.pin(self.worker)
        self._join()  # another worker may have pinned the name meanwhile
        try:
            sequences = await self._register()
        except StoreUnavailable as error:
            self._health.mark_unavailable(error)
            self._check_here(self._claim)
            self._show()
            sequences = self._view.sequences(self.worker)
        self._received = dict(sequences)  # the worker does not send applied events again
        return sequences

    async def reopen(self) -> None:
        """Registers again after an outage of the store; the next replies request what it lacks.

        Raises:
            StoreUnavailable: the store cannot be reached.
        """
        try:
            sequences = await self._register()
        except StoreUnavailable:
            raise
        except Taken as taken:
            self._refused = taken.error
            return
        except SluiceError as error:  # a later start of this worker registered meanwhile
            self._refused = error
            return
        if self.left:
            await self._drain()
        self._unstored = {rank for rank, last in self._received.items() if sequences.get(rank, 0) < last}

    def refuse(self, error: Exception) -> None:
        """Makes `handle` raise, because registering again has failed in an unexpected way."""
        log.error("registering a worker again failed", extra={"worker": self.worker.worker_id}, exc_info=error)
        self._refused = SluiceError(ErrorKind.INTERNAL, "Registering again failed; see the router's log.")

    async def handle(self, messages: Sequence[WorkerMessage]) -> Replies:
        """Handles messages in order; consecutive event batches are applied together.

        Raises:
            SluiceError: the worker sent invalid messages or too many, or was replaced; the caller must disconnect it.
        """
        self._flood.count(len(messages), sum(map(hashes_of, messages)))
        await self._join_again()
        replies = Replies()
        if self._unstored:
            self._request_unstored(replies)
        batches: list[EventBatch] = []
        report: LoadReport | None = None
        for message in messages:
            if isinstance(message, EventBatch):
                batches.append(message)
                continue
            await self._apply(batches, replies)
            batches = []
            if isinstance(message, LoadReport):
                report = message
            elif isinstance(message, SnapshotChunk):
                await self._assemble(message, replies)
            else:
                await self._leave(message)
        await self._apply(batches, replies)
        await self._renew(report)
        if self._refused is not None:
            raise self._refused
        return replies

    async def close(self) -> bool:
        """Removes the worker after its stream ended, unless it attached elsewhere.

        Its reservations are removed too, unless it announced to leave, and its requests still run, or registers again
        within a lease: then only the connection was lost.

        Returns:
            False if the store is unavailable; call `remove` when it returns.
        """
        gone = WorkerDown(self.worker.worker_id, self.worker.epoch)
        try:
            if self._health.available:
                with self._view.pending_change(self.worker.worker_id) as pending:
                    owned = await self.remove()
                if owned and not pending.superseded:
                    self._view.apply(gone)
                return True
        except StoreUnavailable as error:
            self._health.mark_unavailable(error)
        self._view.apply(gone)
        return False

    async def remove(self) -> bool:
        """Removes the worker from the store; returns False if another stream owns it."""
        owned = await self._store.remove(
            self.worker.model, self.worker.worker_id, self.session, self.left, awaited_ms=self._lease_ms
        )
        await self._store.release_claim(self.worker.worker_id, self.session)
        return owned

    def _join(self) -> bool:
        """Decides whether the worker is set aside; returns whether that has changed."""
        reason = reason_to_set_aside(self.worker, self._view.workers, self._pin.known)
        if reason == self.worker.set_aside:
            return False
        about = {"worker": self.worker.worker_id, "model": self.worker.model, "reason": reason}
        if reason:
            log.warning("a worker is set aside and receives no requests: %s", MESSAGES[reason], extra=about)
        else:
            log.info("a worker that was set aside receives requests now", extra=about)
        self.worker = replace(self.worker, set_aside=reason)
        return True

    async def _join_again(self) -> None:
        """Decides again, now and then, for a worker that is set aside or may have to give way; renews the pin."""
        if time.monotonic() >= self._pin.due:
            await self._pin.renew(self.worker)
        if not (self.worker.set_aside or self.worker.named_by_server) or time.monotonic() < self._join_at:
            return
        self._join_at = time.monotonic() + JOIN_EVERY_S
        if self.worker.set_aside:
            await self._pin.read(self.worker)
        if self._join():
            try:
                await self._register()
            except StoreUnavailable as error:
                self._health.mark_unavailable(error)
                self._show()
            except Taken as taken:
                self._refused = taken.error

    async def _leave(self, message: Leaving) -> None:
        self.left = True
        log.info("worker is leaving", extra={"worker": self.worker.worker_id, "reason": message.reason})
        try:
            await self._drain()
        except StoreUnavailable as error:
            self._health.mark_unavailable(error)
            self._view.apply(WorkerDraining(self.worker.worker_id, self.worker.epoch))

    async def _register(self) -> dict[int, int]:
        await self._store.claim(self._claim, self.session, self._lease_ms)
        with self._view.pending_change(self.worker.worker_id) as pending:
            sequences = await self._store.register(self.worker, self.session, self._lease_ms)
        if not pending.superseded:
            self._show()
        self._renewed_at = time.monotonic()
        return sequences

    def _show(self) -> None:
        known = self._view.find(self.worker.worker_id)
        if known is not None and known.holder != self.worker.holder:  # epochs of different processes are not comparable
            self._view.apply(WorkerDown(known.worker_id, known.epoch))
        self._view.apply(WorkerUp(self.worker))

    async def _drain(self) -> None:
        with self._view.pending_change(self.worker.worker_id) as pending:
            owned = await self._store.leave(self.worker.model, self.worker.worker_id, self.session)
        if owned and not pending.superseded:
            self._view.apply(WorkerDraining(self.worker.worker_id, self.worker.epoch))

    async def _renew(self, report: LoadReport | None, now: bool = False) -> None:
        if report is not None:
            self._view.reports[self.worker.worker_id] = report.document
        due = self._renewed_at + self._lease_ms / 1000 / HEARTBEATS_PER_LEASE
        if not self._health.available or (report is None and not now and time.monotonic() < due):
            return
        document = None if report is None else report.document
        try:
            hold = await self._store.renew_claim(self.worker.worker_id, self.session, self._lease_ms)
            lease = await self._store.renew(
                self.worker.model, self.worker.worker_id, self.session, self._lease_ms, document
            )
            self._renewed_at = time.monotonic()
            if hold is not Hold.REPLACED and (lease is Lease.GONE or hold is Hold.GONE):
                await self.reopen()
        except StoreUnavailable as error:
            self._health.mark_unavailable(error)
            return
        if lease is Lease.REPLACED or hold is Hold.REPLACED:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"Worker {self.worker.worker_id} is attached elsewhere; this stream ends.",
                code="replaced",
            )

    async def _apply(self, batches: Sequence[EventBatch], replies: Replies) -> None:
        ready = []
        for batch in batches:
            self._check_rank(batch.rank)
            if not 1 <= batch.sequence < MAX_SEQUENCE:
                raise invalid(
                    f"Sequence number {batch.sequence} is out of range; start at 1 and count up.",
                    param="events.sequence",
                )
            self._received[batch.rank] = max(batch.sequence, self._received.get(batch.rank, 0))
            if batch.rank in self._assemblies:
                self._buffer(batch, replies)
            else:
                ready.append(batch)
        if not ready:
            return
        results = await self._applied(ready, replies)
        for batch, (outcome, sequence) in zip(ready, results, strict=True):
            replies.outcomes[outcome.label] = replies.outcomes.get(outcome.label, 0) + 1
            await self._settle(batch, outcome, sequence, replies)

    async def _applied(self, batches: Sequence[EventBatch], replies: Replies) -> list[Applied]:
        worker = self.worker
        if self._health.available:
            try:
                results = await self._store.apply(
                    worker.model, worker.worker_id, worker.epoch, worker.total_blocks, batches
                )
                for batch in batches:
                    self._view.apply(BlocksChanged(WorkerRank(worker.worker_id, batch.rank), worker.epoch, batch))
                return results
            except StoreUnavailable as error:
                self._health.mark_unavailable(error)
        # The local state stays current during an outage. Nothing is acknowledged because nothing is durable.
        self._unstored |= {batch.rank for batch in batches}
        return [
            Applied(self._view.index.apply(WorkerRank(worker.worker_id, batch.rank), worker.epoch, batch), 0)
            for batch in batches
        ]

    async def _settle(self, batch: EventBatch, outcome: ApplyResult, sequence: int, replies: Replies) -> None:
        if outcome is ApplyResult.OVERFLOW:
            raise self._too_many(batch.rank)
        if outcome is ApplyResult.GAP:
            if batch.rank not in self._assemblies:
                self._request_snapshot(
                    batch.rank, f"received event batch {batch.sequence}, expected {sequence + 1}", replies
                )
                self._buffer(batch, replies)
        elif outcome is ApplyResult.STALE:
            await self._renew(None, now=True)
        elif sequence:
            replies.acks[batch.rank] = max(sequence, replies.acks.get(batch.rank, 0))

    def _request_unstored(self, replies: Replies) -> None:
        """Requests snapshots of ranks whose events the store lacks.

        Only while the store is available, because an earlier snapshot would not reach it, and while no snapshot of the
        rank is in flight, because its remaining chunks would be taken for the new one.
        """
        if self._health.available:
            arriving = {rank for rank, assembly in self._assemblies.items() if assembly.sequence}
            for rank in self._unstored - arriving:
                self._request_snapshot(rank, "the store lacks the last events", replies)
            self._unstored &= arriving

    def _buffer(self, batch: EventBatch, replies: Replies) -> None:
        later = self._assemblies[batch.rank].later
        later.append(batch)
        if len(later) > MAX_BUFFERED:
            self._request_snapshot(batch.rank, "the snapshot did not arrive in time", replies)

    def _request_snapshot(self, rank: int, reason: str, replies: Replies) -> None:
        self._assemblies[rank] = _Assembly()
        replies.resyncs[rank] = reason
        log.info("requesting a snapshot", extra={"worker": self.worker.worker_id, "rank": rank, "reason": reason})

    async def _assemble(self, chunk: SnapshotChunk, replies: Replies) -> None:
        self._check_rank(chunk.rank)
        if chunk.sequence >= MAX_SEQUENCE:
            raise invalid(
                f"Sequence number {chunk.sequence} is too large; use numbers below {MAX_SEQUENCE}.",
                param="snapshot.sequence",
            )
        assembly = self._assemblies.setdefault(chunk.rank, _Assembly())
        if chunk.sequence != assembly.sequence:
            assembly.sequence = chunk.sequence
            assembly.tiers = (bytearray(), bytearray(), bytearray())
        assembly.tiers[chunk.tier].extend(chunk.hashes)
        if len(assembly.tiers[chunk.tier]) > self.worker.total_blocks * HASH_BYTES:
            raise self._too_many(chunk.rank)
        if chunk.last:
            del self._assemblies[chunk.rank]
            device, host, disk = (bytes(tier) for tier in assembly.tiers)
            await self._replace(Snapshot(chunk.rank, chunk.sequence, (device, host, disk)), replies)
            await self._apply(assembly.later, replies)

    async def _replace(self, snapshot: Snapshot, replies: Replies) -> None:
        worker, slot = self.worker, WorkerRank(self.worker.worker_id, snapshot.rank)
        self._received[snapshot.rank] = max(snapshot.sequence, self._received.get(snapshot.rank, 0))
        self._view.replace(slot, worker.epoch, snapshot)
        if not self._health.available:
            self._unstored.add(snapshot.rank)
            return
        try:
            outcome, sequence = await self._store.replace(
                worker.model, worker.worker_id, worker.epoch, worker.total_blocks, snapshot
            )
        except StoreUnavailable as error:
            self._health.mark_unavailable(error)
            self._unstored.add(snapshot.rank)
            return
        if outcome is ApplyResult.OVERFLOW:
            raise self._too_many(snapshot.rank)
        if outcome is not ApplyResult.STALE:
            replies.acks[snapshot.rank] = sequence

    def _check_rank(self, rank: int) -> None:
        if rank >= self.worker.ranks:
            raise invalid(
                f"Worker {self.worker.worker_id} sent events of rank {rank} but registered {self.worker.ranks} ranks.",
                param="data_parallel_rank",
            )

    def _too_many(self, rank: int) -> SluiceError:
        return SluiceError(
            ErrorKind.INVALID_ARGUMENT,
            f"Worker {self.worker.worker_id} reported more blocks on rank {rank} than the "
            f"{self.worker.total_blocks} of its card.",
            code="too_many_blocks",
        )
