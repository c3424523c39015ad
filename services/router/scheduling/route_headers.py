"""Headers in which schedulers pass a routing decision on: Sluice's own, Dynamo's, llm-d's and the Gateway API's."""

from __future__ import annotations

from services.router.scheduling.queries import RouteResult
from services.router.state.workers.worker import Role, Worker

DESTINATION = "x-gateway-destination-endpoint"
WORKER = "x-sluice-worker"
ROUTING_MODE = "x-dynamo-routing-mode"
ROUTE_HEADERS = (
    DESTINATION,
    WORKER,
    "x-sluice-dp-rank",
    "x-sluice-prefill-worker",
    "x-sluice-prefill-dp-rank",
    "x-dynamo-worker-instance-id",
    "x-dynamo-dp-rank",
    ROUTING_MODE,
    "x-dynamo-prefill-instance-id",
    "x-dynamo-prefill-dp-rank",
    "x-worker-instance-id",
    "x-dp-rank",
    "x-prefill-instance-id",
    "x-prefill-dp-rank",
    "x-prefiller-host-port",
    "x-data-parallel-host-port",
    "x-data-parallel-rank",
)
"""All headers that engines and gateways take as a routing decision."""


def headers_of(route: RouteResult) -> dict[str, str]:
    """Returns the headers that these schedulers set for a route; those of a prefill worker only if it has one.

    Of a route of one half, they are those of that half.
    """
    worker, rank = route.worker, str(route.rank)
    if route.half is Role.PREFILL:
        return {ROUTING_MODE: "disaggregated", **_prefill_headers(worker, route.rank)}
    pair = route.prefill_worker is not None or route.half is not None
    headers = {
        DESTINATION: worker.address,
        WORKER: worker.worker_id,
        "x-sluice-dp-rank": rank,
        "x-dynamo-worker-instance-id": worker.worker_id,
        "x-dynamo-dp-rank": rank,
        ROUTING_MODE: "disaggregated" if pair else "aggregated",
        "x-worker-instance-id": worker.worker_id,
        "x-dp-rank": rank,
    }
    if worker.ranks > 1:
        headers["x-data-parallel-host-port"] = worker.http_address or worker.address
        headers["x-data-parallel-rank"] = rank  # what vLLM and SGLang read
    if (prefill := route.prefill_worker) is not None:
        headers |= _prefill_headers(prefill, route.prefill_rank)
    return headers


def _prefill_headers(prefill: Worker, rank: int) -> dict[str, str]:
    return {
        "x-sluice-prefill-worker": prefill.worker_id,
        "x-sluice-prefill-dp-rank": str(rank),
        "x-prefiller-host-port": prefill.http_address or prefill.address,
        "x-dynamo-prefill-instance-id": prefill.worker_id,
        "x-dynamo-prefill-dp-rank": str(rank),
        "x-prefill-instance-id": prefill.worker_id,
        "x-prefill-dp-rank": str(rank),
    }
