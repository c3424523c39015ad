"""The gateway's own routers: one queries the router service, the other chooses from what the gateway knows."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.base.errors import unavailable
from services.gateway.backends.placement.interfaces import AllWorkers, PlacementRequest
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.backends.workers.capabilities import LOAD_ONLY_POLICY
from services.gateway.backends.workers.connections import ConnectionManager
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core.request import Role, Route

ROUTE_SHARE = 0.5


class ServiceRouter:
    """Queries the router service, which decides whether the request runs on a pair of workers.

    Args:
        timeout_s: longest time for a query.
    """

    def __init__(self, client: RouterClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    async def route(self, placement_request: PlacementRequest, workers: Sequence[WorkerEntry]) -> Route:
        """Implements WorkerRouter; raises SluiceError as the router service does."""
        request, prompt, pairs = placement_request.request, placement_request.prompt, placement_request.disaggregation
        alone = placement_request.alone or pairs.mode == "off"
        return await self._client.route(
            placement_request.reservation,
            request.model,
            prompt,
            placement_request.block_size,
            expected_output_tokens=placement_request.output_tokens,
            lora=request.lora,
            cache_salt=request.cache_salt,
            priority=request.priority,
            session_id=request.session_id,
            candidates=None if isinstance(workers, AllWorkers) else [worker.worker_id for worker in workers],
            timeout_s=placement_request.deadline.share(ROUTE_SHARE, self._timeout_s),
            policy=LOAD_ONLY_POLICY if prompt.raw is not None else "",
            book=placement_request.book,
            explain=placement_request.explain,
            role=Role.AGGREGATED if alone else None,
            require_pair=pairs.mode == "require",
            bypass_uncached_tokens=max(pairs.min_tokens - 1, 0),
        )


class LocalRouter:
    """Chooses the least busy workers that this gateway knows, without a router; reserves nothing."""

    def __init__(self, connections: ConnectionManager) -> None:
        self._connections = connections

    async def route(self, placement_request: PlacementRequest, workers: Sequence[WorkerEntry]) -> Route:
        """Implements WorkerRouter.

        Raises:
            SluiceError: UNAVAILABLE if no worker, or pair, that the request may have is connected.
        """
        pairs = placement_request.disaggregation
        needs_pair = pairs.mode == "require" and not pairs.skips(placement_request.prompt.length)
        if not needs_pair:
            alone = self._connections.least_busy([entry.worker_id for entry in workers if entry.runs_alone])
            if alone is not None:
                return Route(alone.worker_id)
        if not placement_request.alone and pairs.mode != "off":
            decode = self._least_busy(workers, Role.DECODE)
            prefill = self._least_busy(workers, Role.PREFILL)
            if decode is not None and prefill is not None:
                return Route(decode, prefill_worker_id=prefill)
        raise unavailable("No connected worker can run this request; try again later.", code="no_workers")

    def _least_busy(self, workers: Sequence[WorkerEntry], role: Role) -> str | None:
        link = self._connections.least_busy([entry.worker_id for entry in workers if entry.role is role])
        return None if link is None else link.worker_id
