"""Requests that may be what ended their workers: which losses count, and where such requests are tried once more.

A worker that dies does not say which of its requests ended it. A request that had no output yet is a suspect; it gets
one more worker, and no other suspect beside it until it has output. So a request that ends every worker it runs on ends
two, and those that were beside it the first time are not beside it the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple
from weakref import WeakSet, ref

from services.common.base.errors import SluiceError
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.core.deaths import is_death
from services.gateway.core.request import GenerationRequest
from services.gateway.streams.stream import GenerationStream


class Death(NamedTuple):
    """The end of a worker, or of one step of its engine, told apart by the number of its session."""

    worker_id: str
    session: int


class Suspects:
    """Remembers the deaths in which requests without output took part, and the streams of these requests.

    Nothing is remembered beyond the life of a request.
    """

    def __init__(self) -> None:
        self._deaths: dict[str, tuple[ref[GenerationRequest], set[Death]]] = {}
        self._running = WeakSet[GenerationStream]()

    def record(
        self,
        stream: GenerationStream,
        lost: WorkerLink,
        error: SluiceError,
        choices: Callable[[], Iterable[GenerationStream]],
    ) -> int:
        """Records the loss of a stream's worker; returns the deaths that its request is suspected of, all choices.

        Args:
            choices: returns the running streams of the same request.
        """
        if has_output(stream) or not is_death(error, stream.slot not in lost.unsent):
            return 0
        self._running.update(choices())
        deaths = self._deaths_of(stream.request)
        if deaths is None:
            name, deaths = stream.request.request_id, set()

            def forget(request: ref[GenerationRequest]) -> None:
                if (known := self._deaths.get(name)) is not None and known[0] is request:
                    del self._deaths[name]

            self._deaths[name] = ref(stream.request, forget), deaths
        deaths.add(Death(lost.worker_id, lost.sessions))
        return len(deaths)

    def _deaths_of(self, request: GenerationRequest) -> set[Death] | None:
        known = self._deaths.get(request.request_id)  # maybe of another request with the same id
        return known[1] if known is not None and known[0]() is request else None

    def includes(self, stream: GenerationStream) -> bool:
        """Returns whether a stream has no output and its request is suspected of a death."""
        return bool(self.deaths(stream)) and not has_output(stream)

    def deaths(self, stream: GenerationStream) -> int:
        """Returns the number of deaths that a stream's request is suspected of, all choices."""
        return len(self._deaths_of(stream.request) or ())

    def start(self, stream: GenerationStream) -> None:
        """Records that a suspect has been placed on another worker."""
        self._running.add(stream)

    def workers_to_avoid(self, stream: GenerationStream, workers: Iterable[str], separate: bool) -> list[str]:
        """Returns the workers on which a suspect must not be placed now.

        Args:
            workers: all workers of its model.
            separate: whether it may not run beside suspects of other requests.
        """
        avoided = []
        for other in self._unproven():
            assert other.worker is not None
            if other.request is stream.request:  # all choices on one worker: each may end it
                return [name for name in workers if name != other.worker.worker_id]
            if separate:
                avoided.append(other.worker.worker_id)
        return avoided

    def _unproven(self) -> list[GenerationStream]:
        return [stream for stream in self._running if stream.worker is not None and not has_output(stream)]


def has_output(stream: GenerationStream) -> bool:
    """Returns whether any worker has generated something for a stream."""
    return bool(stream.tokens or stream.text_sent or stream.sent.reasoning or stream.sent.calls)
