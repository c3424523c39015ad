"""Recovery of the streams of one pipeline: by the pair's decode worker where possible, else by migration."""

from __future__ import annotations

from services.common.errors import SluiceError
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.streams.disaggregation import DisaggOrchestrator
from services.gateway.streams.migration import Migrator
from services.gateway.streams.stream import GenerationStream


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
