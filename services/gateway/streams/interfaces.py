"""What observes streams, and how they end."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from services.common.base.errors import SluiceError, word
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.core.request import Finish
from services.gateway.streams.stream import GenerationStream


class StreamEnd(NamedTuple):
    """How a stream ended: with a finish, with an error, or with neither because its client disconnected."""

    finish: Finish | None = None
    error: SluiceError | None = None

    @property
    def outcome(self) -> str:
        """The end as one word: finished, cancelled, or the code of the error."""
        if self.error is not None:
            return word(self.error)
        return "cancelled" if self.finish is None else "finished"


CANCELLED = StreamEnd()


class StreamObserver(Protocol):
    """Is notified of the life of streams: a few times for each stream, never for a token."""

    def on_started(self, stream: GenerationStream) -> None:
        """Is notified of a new stream, before a worker is assigned to it."""

    def on_assigned(self, stream: GenerationStream, worker_id: str) -> None:
        """Is notified that a worker runs the stream from now on."""

    def on_ended(self, stream: GenerationStream, end: StreamEnd) -> None:
        """Is notified, once, that the stream has ended."""


class NoRecovery:
    """Ends every stream whose worker fails."""

    def on_handoff(self, stream: GenerationStream, handoff: bytes) -> None:
        """See RecoveryPolicy; without recovery, streams have no pairs."""

    def on_interrupted(self, stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> SluiceError | None:
        """See RecoveryPolicy."""
        return error
