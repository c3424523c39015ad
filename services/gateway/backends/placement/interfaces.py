"""What the choice of workers for a request consists of, and the interfaces of those that choose."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from services.gateway.backends.placement.disaggregation_policy import AUTO, DisaggregationPolicy
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core.deadlines import Deadline
from services.gateway.core.request import GenerationRequest, Route, TokenizedPrompt


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A request for workers.

    Attributes:
        reservation: id of the reservation; unique for every attempt to place a stream.
        prompt: the prompt, including tokens that were generated already.
        output_tokens: expected number of output tokens; 0 when unknown.
        needs: capabilities required in addition to those of the request, in the same form.
        book: whether to reserve; False only queries.
        disaggregation: which requests run on a pair of workers; the router decides by it.
        explain: whether the route has the scores of all candidates, with what each of them has cached.
    """

    request: GenerationRequest
    reservation: str
    prompt: TokenizedPrompt
    block_size: int
    output_tokens: int
    deadline: Deadline
    needs: tuple[tuple[str, str], ...] = ()
    book: bool = True
    disaggregation: DisaggregationPolicy = AUTO
    explain: bool = False

    @property
    def alone(self) -> bool:
        """Whether one worker must run the request, because only that has its token ids or its text."""
        return self.prompt.raw is not None or self.request.engine_text


class AllWorkers(list[WorkerEntry]):
    """Every worker of a model; a router that knows them all need not be sent their ids."""


@runtime_checkable
class WorkerRouter(Protocol):
    """Chooses workers for requests, and may reserve capacity there. As a stage, constructed as `Class(components)`.

    `Components.router` is the one of the gateway, which queries the router service. A reservation of another router
    names it in `Route.reservations`.
    """

    async def route(self, placement_request: PlacementRequest, workers: Sequence[WorkerEntry]) -> Route:
        """Returns a route to one of the workers, or to a pair of them.

        It runs to its end even after the request is cancelled, whose reservation is released then.

        Args:
            workers: the workers that can run the request.

        Raises:
            SluiceError: none of the workers is suitable; nothing is reserved then.
        """


class Placement(NamedTuple):
    """A connected worker with a reservation, and the prefill worker of a pair."""

    route: Route
    worker: WorkerLink
    prefill: WorkerLink | None = None


@runtime_checkable
class PlaceStage(Protocol):
    """Chooses connected workers. Constructed as `Class(components)`."""

    async def place(self, placement_request: PlacementRequest, excluded: Collection[str] = ()) -> Placement:
        """Returns a connected worker, or a pair of them.

        Args:
            excluded: ids of workers that must not be chosen.

        Raises:
            SluiceError: retryable if a later attempt may find a worker; no reservation remains then.
        """
