"""Selects workers for generations with the router, ensures they are connected, and retries on others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple, Protocol, runtime_checkable

from services.common.errors import ErrorKind, SluiceError, internal, unavailable
from services.common.observability import telemetry
from services.common.tasks import TaskOwner
from services.gateway.clients.router import RouterClient
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.core.deadlines import Deadline
from services.gateway.core.request import GenerationRequest, Role, Route, TokenizedPrompt
from services.gateway.core.routing_hints import NO_HINTS, described
from services.gateway.placement.disaggregation_policy import DisaggregationPolicy
from services.gateway.workers.capabilities import LOAD_ONLY_POLICY, able, prompt_capabilities, with_adapter
from services.gateway.workers.connections import ConnectionManager
from services.gateway.workers.registry import WorkerEntry, WorkerRegistry

log = logging.getLogger(__name__)

ATTEMPTS = 3
ROUTER_LAG_S = 1.5
ROUTER_RETRY_S = 0.1
ROUTER_UNAVAILABLE = "router_unavailable"
STALE_ROUTER_CODES = ("no_workers", "model_not_found")
"""Error codes of a router that has not yet received the workers' registrations."""
ROUTE_SHARE = 0.5
CONNECT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A request for workers.

    Attributes:
        reservation: id of the reservation; unique for every placement of a stream.
        prompt: the prompt, including tokens that were generated already.
        output_tokens: expected number of output tokens; 0 when unknown.
        needs: capabilities required in addition to those of the request, in the same form.
        book: whether to reserve; False only queries.
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
        """Whether the request cannot be disaggregated, because only one worker has its token ids or its text."""
        return self.prompt.raw is not None or self.request.engine_text


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


CustomRoute = Callable[[PlacementRequest, Sequence[WorkerEntry]], Awaitable[Route]]


class WorkerSelector:
    """Selects workers with the router or a custom route stage.

    Args:
        tasks: owner of router queries that outlive a cancelled request, whose reservations are released.
        disaggregation: decides which requests run on a pair of workers.
        custom_route: custom route stage in place of the router, or None.
    """

    def __init__(
        self,
        router: RouterClient,
        registry: WorkerRegistry,
        connections: ConnectionManager,
        tasks: TaskOwner,
        route_timeout_s: float,
        disaggregation: DisaggregationPolicy,
        custom_route: CustomRoute | None = None,
    ) -> None:
        self._router = router
        self._registry = registry
        self._connections = connections
        self._tasks = tasks
        self._route_timeout_s = route_timeout_s
        self._disaggregation = disaggregation
        self._custom_route = custom_route

    async def place(self, placement_request: PlacementRequest, excluded: Collection[str] = ()) -> Placement:
        """Returns a connected worker, or a pair, with a reservation.

        Args:
            excluded: ids of workers that must not be chosen.

        Raises:
            SluiceError: the router's error, or UNAVAILABLE when no worker is left; no reservation remains then.
        """
        excluded_ids = set(excluded)
        for attempt in range(ATTEMPTS):
            reservation = f"{placement_request.reservation}-{attempt}" if attempt else placement_request.reservation
            route = await self._route(placement_request, reservation, excluded_ids)
            worker_id = route.worker_id
            try:
                route = self._apply_disaggregation(route, placement_request)
                worker = await self._connected(worker_id, placement_request)
                prefill = None
                if route.prefill_worker_id:
                    worker_id = route.prefill_worker_id
                    prefill = await self._connected(worker_id, placement_request)
                return Placement(route, worker, prefill)
            except BaseException as error:
                if route.reservation_id:
                    self._router.free(route.reservation_id)
                excluded_ids.add(worker_id)
                if not isinstance(error, SluiceError) or attempt == ATTEMPTS - 1:
                    raise
                log.warning("%s Retrying on another worker.", error.message)
        raise AssertionError("the last attempt returns or raises")

    async def ask(self, placement_request: PlacementRequest) -> Route:
        """Returns the route that would be chosen, without a reservation; raises SluiceError as `place`."""
        placement_request = replace(placement_request, book=False)
        route = await self._route(placement_request, placement_request.reservation, set())
        return self._apply_disaggregation(route, placement_request)

    def _apply_disaggregation(self, route: Route, placement_request: PlacementRequest) -> Route:
        worker = self._registry.workers.get(route.worker_id)
        return self._disaggregation.apply(route, worker, placement_request.prompt.length)

    async def _connected(self, worker_id: str, placement_request: PlacementRequest) -> WorkerLink:
        worker = self._connections.worker(worker_id)
        await worker.ready(placement_request.deadline.share(CONNECT_SHARE, inf))
        return worker

    async def _route(self, placement_request: PlacementRequest, reservation: str, excluded_ids: set[str]) -> Route:
        candidates = self._candidates(placement_request, excluded_ids)
        try:
            with telemetry.stage("gateway.route"):
                return await self._query_router(placement_request, reservation, candidates)
        except SluiceError as error:
            no_response = error.kind in (ErrorKind.UNAVAILABLE, ErrorKind.DEADLINE_EXCEEDED)
            router_is_stale = error.code in STALE_ROUTER_CODES and self._registry.doubted
            if not router_is_stale and (not no_response or error.code in ("no_workers", "request_timeout")):
                raise
            route = self._fallback_route(placement_request, candidates)
            if route is None:
                raise
            return route

    def _candidates(self, placement_request: PlacementRequest, excluded_ids: set[str]) -> list[str] | None:
        """Returns the ids of the workers that may be chosen, or None for all workers of the model.

        Raises:
            SluiceError: UNAVAILABLE when none is left; INVALID_ARGUMENT when the request names no registered worker, or
                none has the required capabilities.
        """
        request, prompt = placement_request.request, placement_request.prompt
        model, hints = request.model, request.hints
        workers = self._registry.of_model(model)
        remaining = [worker for worker in workers if worker.worker_id not in excluded_ids]
        if excluded_ids and not remaining:
            raise unavailable(f"No worker of model {model!r} can be reached; try again later.", code="no_workers")
        if hints is not NO_HINTS:
            remaining = [one for one in remaining if hints.allows(one.worker_id, one.address, one.role is Role.PREFILL)]
            if not any(one.role is not Role.PREFILL for one in remaining):
                raise (
                    no_such_worker(hints.workers, model, hints.source("workers"))
                    if hints.workers
                    else _no_allowed_worker(model, hints.source("subset"))
                )
        needs = (*request.needs, *placement_request.needs)
        if needs and remaining:
            remaining = able(remaining, needs)
        remaining = with_adapter(remaining, request.lora)
        if engine_needs := prompt_capabilities(prompt, request.engine_text):
            remaining = [one for one in remaining if one.capabilities.issuperset(engine_needs)]
        if remaining:
            remaining = self._disaggregation.eligible(remaining, prompt.length, placement_request.alone)
        healthy = [worker for worker in remaining if self._connections.sound(worker.worker_id)]
        remaining = healthy or remaining  # if all circuit breakers are open, try one anyway
        return None if len(remaining) == len(workers) else [worker.worker_id for worker in remaining]

    async def _query_router(
        self, placement_request: PlacementRequest, reservation: str, candidates: list[str] | None
    ) -> Route:
        """Returns the router's choice; retries briefly while a router replica catches up on new workers."""
        loop = asyncio.get_running_loop()
        model = placement_request.request.model
        give_up_at = loop.time() + ROUTER_LAG_S
        while True:
            query = self._tasks.spawn(self._query_once(placement_request, reservation, candidates), "route")
            try:
                result = await asyncio.shield(query)
            except asyncio.CancelledError:
                query.add_done_callback(self._release_unused)
                raise
            if isinstance(result, Route):
                return result
            router_is_stale = result.code in STALE_ROUTER_CODES
            if not router_is_stale or loop.time() > give_up_at or not self._registry.of_model(model):
                try:
                    raise result
                finally:
                    del result, query  # break the reference cycle: the traceback references this frame
            await asyncio.sleep(ROUTER_RETRY_S)

    async def _query_once(
        self, placement_request: PlacementRequest, reservation: str, candidates: list[str] | None
    ) -> Route | SluiceError:
        """Returns the choice; runs to completion after a cancellation so that its reservation can be released."""
        request = placement_request.request
        try:
            if self._custom_route is not None:
                workers = self._registry.of_model(request.model)
                allowed = workers if candidates is None else [one for one in workers if one.worker_id in candidates]
                return await self._query_custom_route(self._custom_route, placement_request, allowed)
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

    async def _query_custom_route(
        self, route: CustomRoute, placement_request: PlacementRequest, allowed: Sequence[WorkerEntry]
    ) -> Route:
        try:
            return await route(placement_request, allowed)
        except SluiceError:
            raise
        except Exception:
            log.exception("custom route stage failed", extra={"request": placement_request.reservation})
            raise internal("The route stage of this gateway failed; see the gateway's log for details.") from None

    def _release_unused(self, query: asyncio.Task[Route | SluiceError]) -> None:
        if query.cancelled() or query.exception() is not None:
            return
        result = query.result()
        if isinstance(result, Route) and result.reservation_id:
            self._router.free(result.reservation_id)

    def _fallback_route(self, placement_request: PlacementRequest, candidates: list[str] | None) -> Route | None:
        """Returns a route to the least loaded known worker, or pair, while no router is available."""
        if candidates is None:
            candidates = [worker.worker_id for worker in self._registry.of_model(placement_request.request.model)]
        known = [entry for name in candidates if (entry := self._registry.workers.get(name)) is not None]
        alone = [entry.worker_id for entry in known if entry.runs_alone]
        link = self._connections.least_busy(alone)
        if link is not None:
            return Route(worker_id=link.worker_id, degraded=ROUTER_UNAVAILABLE)
        decode = self._connections.least_busy([entry.worker_id for entry in known if entry.role is Role.DECODE])
        prefill = self._connections.least_busy([entry.worker_id for entry in known if entry.role is Role.PREFILL])
        if decode is None or prefill is None:
            return None
        return Route(decode.worker_id, degraded=ROUTER_UNAVAILABLE, prefill_worker_id=prefill.worker_id)


def no_such_worker(names: Sequence[str], model: str, source: str) -> SluiceError:
    """Returns the error for a request that names unregistered workers; retryable, because workers may return.

    Args:
        source: the header or body field that names them.
    """
    message = (
        f"Model {model!r} does not have a worker {' or '.join(names)}, named in {described(source)}; name a registered "
        "worker."
    )
    return SluiceError(ErrorKind.INVALID_ARGUMENT, message, param=source, code="worker_not_found", retryable=True)


def _no_allowed_worker(model: str, source: str) -> SluiceError:
    message = f"None of the endpoints in {described(source)} is a worker of model {model!r}; name a registered worker."
    return SluiceError(ErrorKind.UNAVAILABLE, message, param=source, code="no_workers", retry_after_ms=1000)
