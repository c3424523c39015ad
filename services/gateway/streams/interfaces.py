"""The interfaces between the stream manager and what observes, controls and recovers its streams."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from services.common.errors import SluiceError, word
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.core.request import DisaggregationPart, Finish
from services.gateway.placement.interfaces import Placement
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


class StreamControl(Protocol):
    """What a recovery policy does with streams; implemented by `StreamManager`."""

    def choices(self, stream: GenerationStream) -> list[GenerationStream]:
        """Returns the running streams of the same request."""

    def resume(self, stream: GenerationStream, placement: Placement) -> None:
        """Continues a stream on other workers, with a new reservation."""

    def start_on_worker(
        self,
        stream: GenerationStream,
        worker: WorkerLink,
        rank: int | None,
        name: str,
        resumed: int,
        part: DisaggregationPart | None,
    ) -> None:
        """Continues a stream on another worker of the same reservation."""

    def release_worker(self, stream: GenerationStream) -> None:
        """Detaches a stream from its worker and releases its reservation."""

    def on_degraded(self, stream: GenerationStream, reason: str) -> None:
        """Records a fallback of a stream, once per reason."""

    def give_up(self, stream: GenerationStream, error: SluiceError) -> None:
        """Ends a stream with an error."""
