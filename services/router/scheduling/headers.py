"""HTTP headers for schedulers that route by header: the Gateway API inference extension, Dynamo and llm-d."""

from __future__ import annotations

from services.router.scheduling.queries import Route


def headers_of(route: Route) -> dict[str, str]:
    """Returns the headers that these schedulers set for a route; those of a prefill worker only if it has one."""
    worker, rank = route.worker, str(route.rank)
    headers = {
        "x-gateway-destination-endpoint": worker.address,
        "x-dynamo-worker-instance-id": worker.worker_id,
        "x-dynamo-dp-rank": rank,
        "x-worker-instance-id": worker.worker_id,
        "x-dp-rank": rank,
    }
    if worker.ranks > 1:
        headers["x-data-parallel-host-port"] = worker.address
    if (prefill := route.prefill_worker) is not None:
        prefill_rank = str(route.prefill_rank)
        headers |= {
            "x-prefiller-host-port": prefill.address,
            "x-dynamo-prefill-instance-id": prefill.worker_id,
            "x-dynamo-prefill-dp-rank": prefill_rank,
            "x-prefill-instance-id": prefill.worker_id,
            "x-prefill-dp-rank": prefill_rank,
        }
    return headers
