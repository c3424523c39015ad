"""Disaggregation: a prefill worker computes the prompt and the first token, a decode worker the rest.

The router chooses the pair for each request; this module passes the handoff on, and handles failures of pairs. Clients
receive the first token directly from the prefill worker. One reservation covers both workers.
"""

from __future__ import annotations

import logging

from services.common.base.errors import SluiceError, unavailable
from services.gateway.backends.placement.disaggregation_policy import DisaggregationPolicy
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.backends.workers.connections import ConnectionManager
from services.gateway.backends.workers.registry import WorkerRegistry
from services.gateway.core.request import DisaggregationPart, Role
from services.gateway.metrics import GatewayMetrics
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.migration import RESUME_GUIDED, Migrator, note_inexact
from services.gateway.streams.states import StreamState
from services.gateway.streams.stream import GenerationStream

log = logging.getLogger(__name__)

PREFILL_FAILED = "prefill_failed"
HANDOFF_REFUSED = "handoff_refused"

HANDOFF_PARAM = "disaggregation"
"""The `param` of a worker's error when it cannot take its role in a pair."""


class StreamRecovery:
    """Implements RecoveryPolicy: passes handoffs on, and continues streams whose worker fails.

    Args:
        migrator: migrates what the other worker of a pair cannot continue.
        migrates: whether generations may migrate.
    """

    def __init__(
        self,
        policy: DisaggregationPolicy,
        registry: WorkerRegistry,
        connections: ConnectionManager,
        streams: StreamManager,
        metrics: GatewayMetrics,
        migrator: Migrator,
        migrates: bool,
    ) -> None:
        self._policy = policy
        self._registry = registry
        self._connections = connections
        self._streams = streams
        self._metrics = metrics
        self._migrator = migrator
        self._migrates = migrates

    def on_handoff(self, stream: GenerationStream, handoff: bytes) -> None:
        """Starts the decode worker of a pair with the handoff of the prefill worker."""
        assert stream.attempt is not None
        decode = stream.attempt.decode
        assert decode is not None
        if decode.worker.connected:
            self._metrics.disaggregated("pair")
            if stream.span is not None:
                stream.span.add_event("handed over", {"to": decode.worker.worker_id, "bytes": len(handoff)})
        self._streams.start_on_worker(stream, decode._replace(part=DisaggregationPart(Role.DECODE, handoff)))

    def on_interrupted(self, stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> SluiceError | None:
        """Continues a stream on the decode worker of its pair, or else on other workers."""
        remaining_error = self._rescue(stream, worker, error)
        if remaining_error is None or self._migrator.take_over(stream, worker, remaining_error):
            return None
        return remaining_error

    def _rescue(self, stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> SluiceError | None:
        """Handles the failure of a worker of a pair.

        The decode worker runs the request alone if it can and no other prefill worker is available; otherwise the
        request migrates to another pair.

        Returns:
            None if the decode worker has taken over, else the error to continue with.
        """
        if stream.state is StreamState.RUNNING:
            return error
        assert stream.attempt is not None
        decode = stream.attempt.decode
        assert decode is not None
        refused, handed_over = error.param == HANDOFF_PARAM, stream.state is StreamState.DECODING
        if handed_over and not (refused and len(stream.tokens) == stream.resumed):
            return error  # the decode worker was generating already: an ordinary loss
        if not refused and not error.retryable:
            return error
        reason = HANDOFF_REFUSED if handed_over else PREFILL_FAILED
        self._metrics.disaggregated(reason)
        log.warning(
            "pair of workers failed: %s",
            error.message,
            extra={"request": stream.request_id, "worker": worker.worker_id, "reason": reason},
        )
        replaceable = not handed_over and self._migrates and self._has_other_prefill(stream, worker)
        if self._can_run_alone(stream, decode.worker) and not replaceable:
            self._streams.degrade(stream, reason)
            note_inexact(self._streams, stream, self._registry.workers[decode.worker.worker_id])
            alone = decode._replace(name=f"{decode.name}-alone", resumed=len(stream.tokens))
            self._streams.start_on_worker(stream, alone)
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
        links = [
            self._connections.find(entry.worker_id)
            for entry in self._registry.of_model(stream.model)
            if entry.role is Role.PREFILL
        ]
        return any(link is not None and link is not lost and link.connected for link in links)
