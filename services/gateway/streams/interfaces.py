"""The interfaces between the stream manager and what observes, controls and recovers its streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from services.common.errors import SluiceError, word
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.core.request import DisaggregationPart, Finish, FinishReason
from services.gateway.placement.selector import Placement

if TYPE_CHECKING:
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


class RecoveryPolicy(Protocol):
    """Decides how a stream continues when its worker cannot finish it."""

    def on_handoff(self, stream: GenerationStream, handoff: bytes) -> None:
        """Continues a stream on the decode worker of its pair, with the handoff of the prefill worker."""

    def on_interrupted(self, stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> SluiceError | None:
        """Handles the failure of a stream's worker.

        Returns:
            None if the stream continues, at once or later, else the error to end it with.
        """


class NoRecovery:
    """Ends every stream whose worker fails."""

    def on_handoff(self, stream: GenerationStream, handoff: bytes) -> None:
        """See RecoveryPolicy; without recovery, streams have no pairs."""

    def on_interrupted(self, stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> SluiceError | None:
        """See RecoveryPolicy."""
        return error


class StreamControl(Protocol):
    """What a recovery policy does with streams; implemented by `StreamManager`."""

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


class TextLink(Protocol):
    """Turns the tokens of streams into text: the link to a postprocess replica, or a custom stage."""

    leaving: bool

    def adopt(self, stream: GenerationStream) -> None: ...

    def release(self, stream: GenerationStream) -> None: ...

    def open(self, stream: GenerationStream) -> None: ...

    def feed(self, slots: bytes, counts: bytes, token_ids: bytes) -> None: ...

    def end(self, slot: int, reason: FinishReason, stop_token_id: int | None) -> None: ...

    def close_stream(self, slot: int) -> None: ...
