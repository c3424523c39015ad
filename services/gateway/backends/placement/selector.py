"""Selects workers for generations with a router, ensures they are connected, and retries on others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf

from services.common.base.errors import ErrorKind, NoAnswerError, SluiceError, internal, unavailable
from services.common.base.tasks import TaskOwner
from services.common.observability import telemetry
from services.common.rpc.errors import PEER_CANCELLED, PEER_REFUSED
from services.gateway.backends.placement.interfaces import AllWorkers, Placement, PlacementRequest, WorkerRouter
from services.gateway.backends.placement.routers import LocalRouter
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.backends.workers.capabilities import able, prompt_capabilities, with_adapter
from services.gateway.backends.workers.connections import ConnectionManager
from services.gateway.backends.workers.registry import WorkerEntry, WorkerRegistry
from services.gateway.core.request import Reservations, Role, Route
from services.gateway.core.routing_hints import NO_HINTS, described

log = logging.getLogger(__name__)

ATTEMPTS = 3
ROUTER_LAG_S = 1.5
ROUTER_RETRY_S = 0.1
ROUTER_UNAVAILABLE = "router_unavailable"
STALE_ROUTER_CODES = ("no_workers", "model_not_found")
"""Error codes of a router that has not yet received the workers' registrations."""
UNDECIDED_CODES = ("stopping", "not_ready", PEER_REFUSED, PEER_CANCELLED)
"""Error codes of a router that answers without a decision: it starts, stops, or does not accept this gateway."""
CONNECT_SHARE = 0.5


class WorkerSelector:
    """Selects workers with a router, and with what the gateway knows while the router does not answer.

    Args:
        reservations: receives the outcomes of reservations whose route does not name another.
        tasks: owner of router queries that outlive a cancelled request, whose reservations are released.
    """

    def __init__(
        self,
        router: WorkerRouter,
        reservations: Reservations,
        registry: WorkerRegistry,
        connections: ConnectionManager,
        tasks: TaskOwner,
    ) -> None:
        self._router = router
        self._fallback = LocalRouter(connections)
        self._reservations = reservations
        self._registry = registry
        self._connections = connections
        self._tasks = tasks

    async def place(self, placement_request: PlacementRequest, excluded: Collection[str] = ()) -> Placement:
        """Returns a connected worker, or a pair, with a reservation.

        Args:
            excluded: ids of workers that must not be chosen.

        Raises:
            SluiceError: the router's error, or UNAVAILABLE when no worker is left; no reservation remains then.
        """
        excluded_ids = set(excluded)
        for attempt in range(ATTEMPTS):
            attempted = placement_request
            if attempt:
                attempted = replace(attempted, reservation=f"{placement_request.reservation}-{attempt}")
            route = await self._route(attempted, excluded_ids)
            worker_id = route.worker_id
            try:
                worker = await self._connected(worker_id, placement_request)
                prefill = None
                if route.prefill_worker_id:
                    worker_id = route.prefill_worker_id
                    prefill = await self._connected(worker_id, placement_request)
                return Placement(route, worker, prefill)
            except BaseException as error:
                self._free(route)
                excluded_ids.add(worker_id)
                if not isinstance(error, SluiceError) or attempt == ATTEMPTS - 1:
                    raise
                log.warning("%s Retrying on another worker.", error.message)
        raise AssertionError("the last attempt returns or raises")

    async def ask(self, placement_request: PlacementRequest) -> Route:
        """Returns the route that would be chosen, without a reservation; raises SluiceError as `place`."""
        return await self._route(replace(placement_request, book=False), set())

    async def _connected(self, worker_id: str, placement_request: PlacementRequest) -> WorkerLink:
        worker = self._connections.worker(worker_id)
        await worker.ready(placement_request.deadline.share(CONNECT_SHARE, inf))
        return worker

    async def _route(self, placement_request: PlacementRequest, excluded_ids: set[str]) -> Route:
        route = await self._any_route(placement_request, self._candidates(placement_request, excluded_ids))
        worker = self._registry.workers.get(route.worker_id)
        try:
            return placement_request.disaggregation.apply(route, worker, placement_request.prompt.length)
        except SluiceError:
            self._free(route)
            raise

    async def _any_route(self, placement_request: PlacementRequest, workers: Sequence[WorkerEntry]) -> Route:
        """Returns the router's route, or one to the least busy workers while no router answers."""
        try:
            with telemetry.stage("gateway.route"):
                return await self._query_router(placement_request, workers)
        except SluiceError as error:
            router_is_stale = error.code in STALE_ROUTER_CODES and self._registry.doubted
            if not (router_is_stale or isinstance(error, NoAnswerError) or error.code in UNDECIDED_CODES):
                raise
            try:
                route = await self._fallback.route(placement_request, workers)
            except SluiceError:
                raise error from None
            return replace(route, degraded=ROUTER_UNAVAILABLE)

    def _candidates(self, placement_request: PlacementRequest, excluded_ids: set[str]) -> Sequence[WorkerEntry]:
        """Returns the workers that may be chosen; all workers of the model as `AllWorkers`.

        Raises:
            SluiceError: UNAVAILABLE when none is left or the request names no registered worker; INVALID_ARGUMENT when
                none has the required capabilities.
        """
        request, prompt = placement_request.request, placement_request.prompt
        model, hints = request.model, request.hints
        workers = self._registry.of_model(model)
        remaining = [worker for worker in workers if worker.worker_id not in excluded_ids] if excluded_ids else workers
        if excluded_ids and not any(worker.role is not Role.PREFILL for worker in remaining):
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
        if request.lora:
            remaining = with_adapter(remaining, request.lora)
        if engine_needs := prompt_capabilities(prompt, request.engine_text):
            remaining = [one for one in remaining if one.capabilities.issuperset(engine_needs)]
        healthy = [worker for worker in remaining if self._connections.sound(worker.worker_id)]
        if any(worker.role is not Role.PREFILL for worker in healthy):  # else try one whose circuit breaker is open
            remaining = healthy
        # A worker may be excluded of which only the router knows yet: without the list, it would be chosen again.
        return AllWorkers(workers) if len(remaining) == len(workers) and not excluded_ids else remaining

    async def _query_router(self, placement_request: PlacementRequest, workers: Sequence[WorkerEntry]) -> Route:
        """Returns the router's choice; retries briefly while a router replica catches up on new workers."""
        loop = asyncio.get_running_loop()
        model = placement_request.request.model
        give_up_at = loop.time() + ROUTER_LAG_S
        while True:
            query = self._tasks.spawn(self._query_once(placement_request, workers), "route")
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
        self, placement_request: PlacementRequest, workers: Sequence[WorkerEntry]
    ) -> Route | SluiceError:
        """Returns the choice; runs to completion after a cancellation so that its reservation can be released."""
        try:
            return await self._router.route(placement_request, workers)
        except SluiceError as error:
            return error
        except Exception:
            log.exception("route stage failed", extra={"request": placement_request.reservation})
            return internal("The route stage of this gateway failed; see the gateway's log for details.")

    def _release_unused(self, query: asyncio.Task[Route | SluiceError]) -> None:
        if query.cancelled() or query.exception() is not None:
            return
        result = query.result()
        if isinstance(result, Route):
            self._free(result)

    def _free(self, route: Route) -> None:
        if route.reservation_id:
            (route.reservations or self._reservations).free(route.reservation_id)


def no_such_worker(names: Sequence[str], model: str, source: str) -> SluiceError:
    """Returns the error for a request that names unregistered workers.

    Retryable: the worker may have just ended, or just started, and its picker learns of that at another time than this
    gateway.

    Args:
        source: the header or body field that names them.
    """
    message = (
        f"Model {model!r} does not have a worker {' or '.join(names)}, named in {described(source)}, now; name a "
        "registered worker, or try again later."
    )
    return SluiceError(ErrorKind.UNAVAILABLE, message, param=source, code="worker_not_found", retry_after_ms=1000)


def _no_allowed_worker(model: str, source: str) -> SluiceError:
    message = f"None of the endpoints in {described(source)} is a worker of model {model!r}; name a registered worker."
    return SluiceError(ErrorKind.UNAVAILABLE, message, param=source, code="no_workers", retry_after_ms=1000)
