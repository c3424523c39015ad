"""Disaggregation: a prefill worker computes the prompt and the first token, a decode worker the rest.

The router chooses the pair for each request; this module passes the handoff on, and handles failures of pairs. Clients
receive the first token directly from the prefill worker. One reservation covers both workers.
"""

from __future__ import annotations

import logging

from services.common.errors import SluiceError, unavailable
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.core.request import DisaggregationPart, Role
from services.gateway.metrics import GatewayMetrics
from services.gateway.placement.disaggregation_policy import DisaggregationPolicy
from services.gateway.streams.interfaces import StreamControl
from services.gateway.streams.migration import RESUME_GUIDED, Migrator, note_inexact
from services.gateway.streams.stream import GenerationStream
from services.gateway.workers.connections import ConnectionManager
from services.gateway.workers.registry import WorkerRegistry

log = logging.getLogger(__name__)

PREFILL_FAILED = "prefill_failed"
HANDOFF_REFUSED = "handoff_refused"

HANDOFF_PARAM = "disaggregation"
"""The `param` of a worker's error when it cannot take its role in a pair."""


class DisaggOrchestrator:
    """Passes handoffs from prefill to decode workers, and handles failures of pairs.

    Args:
        migrates: whether generations may migrate.
    """

    def __init__(
        self,
        policy: DisaggregationPolicy,
        registry: WorkerRegistry,
        connections: ConnectionManager,
        streams: StreamControl,
        metrics: GatewayMetrics,
        migrates: bool,
    ) -> None:
        self._policy = policy
        self._registry = registry
        self._connections = connections
        self._streams = streams
        self._metrics = metrics
        self._migrates = migrates

    def hand_over(self, stream: GenerationStream, handoff: bytes) -> None:
        """Starts the decode worker with the handoff of the prefill worker."""
        pair = stream.pair
        assert pair is not None
        stream.handed_over = True
        if pair.worker.connected:
            self._metrics.disaggregated("pair")
            if stream.span is not None:
                stream.span.add_event("handed over", {"to": pair.worker.worker_id, "bytes": len(handoff)})
        self._streams.start_on_worker(
            stream, pair.worker, pair.rank, pair.name, pair.resumed, DisaggregationPart(Role.DECODE, handoff)
        )

    def rescue(self, stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> SluiceError | None:
        """Handles the failure of a worker of a pair.

        The decode worker runs the request alone if it can and no other prefill worker is available; otherwise the
        request migrates to another pair.

        Returns:
            None if the decode worker has taken over, else the error to continue with.
        """
        pair = stream.pair
        if pair is None:
            return error
        refused = error.param == HANDOFF_PARAM
        if stream.handed_over and not (refused and len(stream.tokens) == stream.resumed):
            return error  # the decode worker was generating already: an ordinary loss
        if not refused and not error.retryable:
            return error
        reason = HANDOFF_REFUSED if stream.handed_over else PREFILL_FAILED
        self._metrics.disaggregated(reason)
        log.warning(
            "pair of workers failed: %s",
            error.message,
            extra={"request": stream.request_id, "worker": worker.worker_id, "reason": reason},
        )
        if self._can_run_alone(stream, pair.worker) and not self._has_other_prefill(stream, worker):
            self._run_alone(stream, pair.worker, pair.rank, f"{pair.name}-alone", reason)
            return None
        if not refused:
            return error
        return unavailable(
            "The prefill and decode workers of this request could not hand it over; try again.", code=reason
        )

    def _can_run_alone(self, stream: GenerationStream, worker: WorkerLink) -> bool:
        entry = self._registry.workers.get(worker.worker_id)
        if self._policy.mode != "auto" or entry is None or not entry.runs_alone or not worker.connected:
            return False
        return not (stream.tokens and stream.request.guided is not None) or RESUME_GUIDED in entry.capabilities

    def _has_other_prefill(self, stream: GenerationStream, lost: WorkerLink) -> bool:
        """Returns whether another prefill worker can replace a lost one."""
        if stream.handed_over or not self._migrates:
            return False
        others = (one for one in self._registry.of_model(stream.model) if one.role is Role.PREFILL)
        return any(
            (link := self._connections.find(one.worker_id)) is not None and link is not lost and link.connected
            for one in others
        )

    def _run_alone(
        self, stream: GenerationStream, worker: WorkerLink, rank: int | None, name: str, reason: str
    ) -> None:
        self._streams.on_degraded(stream, reason)
        note_inexact(self._streams, stream, self._registry.workers[worker.worker_id])
        stream.pair = None
        self._streams.start_on_worker(stream, worker, rank, name, len(stream.tokens), None)


class StreamRecovery:
    """Implements RecoveryPolicy with disaggregation and migration."""

    def __init__(self, pairs: DisaggOrchestrator, migrator: Migrator) -> None:
        self._pairs = pairs
        self._migrator = migrator

    def on_handoff(self, stream: GenerationStream, handoff: bytes) -> None:
        """See RecoveryPolicy."""
        self._pairs.hand_over(stream, handoff)

    def on_interrupted(self, stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> SluiceError | None:
        """See RecoveryPolicy."""
        remaining_error = self._pairs.rescue(stream, worker, error)
        if remaining_error is None or self._migrator.take_over(stream, worker, remaining_error):
            return None
        return remaining_error
