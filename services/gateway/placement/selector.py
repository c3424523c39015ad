"""A worker for a generation: asks the router, makes sure of the connection, and leaves out workers that failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple, Protocol

from services.common.errors import ErrorKind, SluiceError, internal, unavailable
from services.common.observability import telemetry
from services.common.tasks import TaskOwner
from services.gateway.clients.router import RouterClient
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.core.deadlines import Deadline
from services.gateway.core.request import GenerationRequest, Role, Route, TokenizedPrompt
from services.gateway.core.routing_hints import NO_HINTS, described
from services.gateway.workers.capabilities import LOAD_ONLY_POLICY, able, holding, prompt_capabilities
from services.gateway.workers.connections import ConnectionManager
from services.gateway.workers.registry import WorkerEntry, WorkerRegistry

log = logging.getLogger(__name__)

ATTEMPTS = 3
ROUTER_LAG_S = 1.5
ROUTER_RETRY_S = 0.1
ROUTER_AWAY = "router_unavailable"
STALE_ROUTER_CODES = ("no_workers", "model_not_found")
"""What a router says that has not heard of the workers."""
ROUTE_SHARE = 0.5
CONNECT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What is to be placed.

    Attributes:
        booking: names the reservation; unique for every placement of a stream.
        prompt: with what was generated already, if anything was.
        output_tokens: expected to come; 0 when unknown.
        needs: capabilities beyond those of the request, as there.
        book: False only asks.
    """

    request: GenerationRequest
    reservation: str
    prompt: TokenizedPrompt
    block_size: int
    output_tokens: int
    deadline: Deadline
    needs: tuple[tuple[str, str], ...] = ()
    book: bool = True

    @property
    def alone(self) -> bool:
        """Two workers cannot share it: one of them would not know the ids, or the text so far."""
        return self.prompt.raw is not None or self.request.engine_text


class Placement(NamedTuple):
    """A worker with a connection and a booking; `prefill` computes the prompt for it, if it is not None."""

    route: Route
    worker: WorkerLink
    prefill: WorkerLink | None = None


class DisaggregationPolicy(Protocol):
    """Which requests two workers share, as `disaggregation.DisaggRules` says."""

    def eligible(
        self, workers: Sequence[WorkerEntry], prompt_tokens: int, alone: bool = False
    ) -> list[WorkerEntry]: ...

    def judged(self, route: Route, chosen: WorkerEntry | None, prompt_tokens: int) -> Route: ...


OwnRoute = Callable[[PlacementRequest, Sequence[WorkerEntry]], Awaitable[Route]]


class WorkerSelector:
    """Finds workers for generations.

    Args:
        sharing: says which requests a pair of workers serves.

    Attributes:
        own_route: chooses in place of the router, if it is not None.
        tasks: owns questions to the router whose asker has gone: what they book is given back.
    """

    def __init__(
        self,
        router: RouterClient,
        registry: WorkerRegistry,
        connections: ConnectionManager,
        tasks: TaskOwner,
        route_timeout_s: float,
        sharing: DisaggregationPolicy,
    ) -> None:
        self._router = router
        self._registry = registry
        self._connections = connections
        self._tasks = tasks
        self._route_timeout_s = route_timeout_s
        self._sharing = sharing
        self.own_route: OwnRoute | None = None

    async def place(self, placement_request: PlacementRequest, excluded: Collection[str] = ()) -> Placement:
        """A worker, or a pair, with connections and a booking.

        Args:
            excluded: ids of workers that must not be chosen.

        Raises:
            SluiceError: as the router says, UNAVAILABLE when no worker is left; nothing is booked then.
        """
        avoided = set(excluded)
        for attempt in range(ATTEMPTS):
            reservation = f"{placement_request.reservation}-{attempt}" if attempt else placement_request.reservation
            route = await self._route(placement_request, reservation, avoided)
            trying = route.worker_id
            try:
                route = self._sharing.judged(route, self._registry.workers.get(trying), placement_request.prompt.length)
                worker = await self._connected(trying, placement_request)
                prefill = None
                if route.prefill_worker_id:
                    trying = route.prefill_worker_id
                    prefill = await self._connected(trying, placement_request)
                return Placement(route, worker, prefill)
            except BaseException as error:
                if route.reservation_id:
                    self._router.free(route.reservation_id)
                avoided.add(trying)
                if not isinstance(error, SluiceError) or attempt == ATTEMPTS - 1:
                    raise
                log.warning("%s Trying another worker.", error.message)
        raise AssertionError("the last attempt returns or raises")

    async def ask(self, placement_request: PlacementRequest) -> Route:
        """Who would be chosen; nothing is booked. SluiceError as `place`."""
        placement_request = replace(placement_request, book=False)
        route = await self._route(placement_request, placement_request.reservation, set())
        return self._sharing.judged(route, self._registry.workers.get(route.worker_id), placement_request.prompt.length)

    async def _connected(self, worker_id: str, placement_request: PlacementRequest) -> WorkerLink:
        worker = self._connections.worker(worker_id)
        await worker.ready(placement_request.deadline.share(CONNECT_SHARE, inf))
        return worker

    async def _route(self, placement_request: PlacementRequest, reservation: str, avoided: set[str]) -> Route:
        candidates = self._candidates(placement_request, avoided)
        try:
            with telemetry.stage("gateway.route"):
                return await self._ask_router(placement_request, reservation, candidates)
        except SluiceError as error:
            unanswered = error.kind in (ErrorKind.UNAVAILABLE, ErrorKind.DEADLINE_EXCEEDED)
            behind = error.code in STALE_ROUTER_CODES and self._registry.doubted
            if not behind and (not unanswered or error.code in ("no_workers", "request_timeout")):
                raise
            route = self._without_router(placement_request, candidates)
            if route is None:
                raise
            return route

    def _candidates(self, placement_request: PlacementRequest, avoided: set[str]) -> list[str] | None:
        """Ids of the workers that may be chosen; None when all of the model may.

        Raises:
            SluiceError: UNAVAILABLE when none is left, INVALID_ARGUMENT when none can do what is needed.
        """
        model = placement_request.request.model
        workers = self._registry.of_model(model)
        left = [worker for worker in workers if worker.worker_id not in avoided]
        if avoided and not left:
            raise unavailable(f"No worker of model {model!r} can be reached.", code="no_workers")
        said = placement_request.request.hints
        if said is not NO_HINTS:
            left = [one for one in left if said.allows(one.worker_id, one.address, one.role is Role.PREFILL)]
            if not any(one.role is not Role.PREFILL for one in left):
                raise (
                    no_such_worker(said.workers, model, said.source("workers"))
                    if said.workers
                    else _nobody_allowed(model, said.source("subset"))
                )
        needs = (*placement_request.request.needs, *placement_request.needs)
        if needs and left:
            left = able(left, needs)
        left = holding(left, placement_request.request.lora)
        of_engine = prompt_capabilities(placement_request.prompt, placement_request.request.engine_text)
        left = [one for one in left if all(each in one.capabilities for each in of_engine)] if of_engine else left
        if left:
            left = self._sharing.eligible(left, placement_request.prompt.length, placement_request.alone)
        sound = [worker for worker in left if self._connections.sound(worker.worker_id)]
        left = sound or left  # all of them troubled: better than none
        return None if len(left) == len(workers) else [worker.worker_id for worker in left]

    async def _ask_router(
        self, placement_request: PlacementRequest, reservation: str, candidates: list[str] | None
    ) -> Route:
        """The router's choice. A replica that has not heard yet of workers another one announced gets a moment."""
        loop = asyncio.get_running_loop()
        patience = loop.time() + ROUTER_LAG_S
        while True:
            asking = self._tasks.spawn(self._ask_once(placement_request, reservation, candidates), "route")
            try:
                answer = await asyncio.shield(asking)
            except asyncio.CancelledError:
                asking.add_done_callback(self._give_back)
                raise
            if isinstance(answer, Route):
                return answer
            behind = answer.code in STALE_ROUTER_CODES
            if not behind or loop.time() > patience or not self._registry.of_model(placement_request.request.model):
                try:
                    raise answer
                finally:
                    del answer, asking  # its traceback holds this call, which must not hold it as well
            await asyncio.sleep(ROUTER_RETRY_S)

    async def _ask_once(
        self, placement_request: PlacementRequest, reservation: str, candidates: list[str] | None
    ) -> Route | SluiceError:
        """What is chosen; goes on when whoever asked is gone, so that no booking is made unseen."""
        request = placement_request.request
        try:
            if self.own_route is not None:
                workers = self._registry.of_model(request.model)
                allowed = workers if candidates is None else [one for one in workers if one.worker_id in candidates]
                return await self._ask_own_route(self.own_route, placement_request, allowed)
            return await self._router.route(
                reservation,
                request.model,
                placement_request.prompt,
                placement_request.block_size,
                expected_output_tokens=placement_request.output_tokens,
                lora=request.lora,
                cache_salt=request.cache_salt,
                priority=request.priority,
                session_id=request.session_id,
                candidates=candidates,
                timeout_s=placement_request.deadline.share(ROUTE_SHARE, self._route_timeout_s),
                policy=LOAD_ONLY_POLICY if placement_request.prompt.raw is not None else "",
                book=placement_request.book,
            )
        except SluiceError as error:
            return error

    async def _ask_own_route(
        self, route: OwnRoute, placement_request: PlacementRequest, allowed: Sequence[WorkerEntry]
    ) -> Route:
        try:
            return await route(placement_request, allowed)
        except SluiceError:
            raise
        except Exception:
            log.exception("the route stage failed", extra={"request": placement_request.reservation})
            raise internal("The route stage of this gateway failed; its log has the details.") from None

    def _give_back(self, asked: asyncio.Task[Route | SluiceError]) -> None:
        if asked.cancelled() or asked.exception() is not None:
            return
        answer = asked.result()
        if isinstance(answer, Route) and answer.reservation_id:
            self._router.free(answer.reservation_id)

    def _without_router(self, placement_request: PlacementRequest, candidates: list[str] | None) -> Route | None:
        """No router answers: the worker last seen that has least to do, or the pair when none runs alone."""
        if candidates is None:
            candidates = [worker.worker_id for worker in self._registry.of_model(placement_request.request.model)]
        known = [entry for name in candidates if (entry := self._registry.workers.get(name)) is not None]
        alone = [entry.worker_id for entry in known if entry.runs_alone]
        link = self._connections.least_busy(alone)
        if link is not None:
            return Route(worker_id=link.worker_id, degraded=ROUTER_AWAY)
        decode = self._connections.least_busy([entry.worker_id for entry in known if entry.role is Role.DECODE])
        prefill = self._connections.least_busy([entry.worker_id for entry in known if entry.role is Role.PREFILL])
        if decode is None or prefill is None:
            return None
        return Route(decode.worker_id, degraded=ROUTER_AWAY, prefill_worker_id=prefill.worker_id)


def no_such_worker(names: Sequence[str], model: str, source: str) -> SluiceError:
    """Returns the error of a request that names workers that are not there; it is retryable, because workers return.

    Args:
        source: the header or the body's field that names them.
    """
    message = (
        f"No worker of model {model!r} is {' or '.join(names)}, named in {described(source)}; name one that is there."
    )
    return SluiceError(ErrorKind.NOT_FOUND, message, param=source, code="worker_not_found", retryable=True)


def _nobody_allowed(model: str, source: str) -> SluiceError:
    message = f"None of the endpoints in {described(source)} is a worker of model {model!r}."
    return SluiceError(ErrorKind.UNAVAILABLE, message, param=source, code="no_workers", retry_after_ms=1000)
