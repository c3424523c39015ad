"""The gateway's own routers: one queries the router service, the other chooses from what the gateway knows."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.base.errors import unavailable
from services.common.discovery.handoff_forms import can_hand_over
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
        pair = None if placement_request.alone or pairs.mode == "off" else self._least_busy_pair(workers)
        if pair is not None:
            prefill, decode = pair
            return Route(decode, prefill_worker_id=prefill)
        raise unavailable("No connected worker can run this request; try again later.", code="no_workers")

    def _least_busy_pair(self, workers: Sequence[WorkerEntry]) -> tuple[str, str] | None:
        """Returns the ids of a prefill worker and of a decode worker to which it can hand over."""
        prefill = {entry.worker_id: entry.handoff_form for entry in workers if entry.role is Role.PREFILL}
        left = {entry.worker_id: entry.handoff_form for entry in workers if entry.role is Role.DECODE}
        while (decode := self._connections.least_busy([*left])) is not None:
            form = left[decode.worker_id]
            partners = [name for name, handoff_form in prefill.items() if can_hand_over(handoff_form, form)]
            if (partner := self._connections.least_busy(partners)) is not None:
                return partner.worker_id, decode.worker_id
            left = {name: handoff_form for name, handoff_form in left.items() if handoff_form != form}
        return None
