"""The state of every worker as listed by a router: its own reports and the reservations on it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.rpc.replicas import ReplicaSet
from sluice.v1 import common_pb2, router_pb2, router_pb2_grpc

_ROLES = {common_pb2.WORKER_ROLE_PREFILL: "prefill", common_pb2.WORKER_ROLE_DECODE: "decode"}


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker; blocks and requests are totals over its data-parallel ranks.

    Attributes:
        set_aside: why it is registered but receives no requests, such as `tokenizer_differs`; else empty.
        running: requests in the batch, as last reported.
        waiting: requests queued for the batch, as last reported.
        used_blocks: blocks held by running requests.
        cached_blocks: blocks that hold reusable prefixes, whether in use or not.
        step_ms: duration of a step of the engine, as last reported.
        booked: requests for which the router has a reservation on the worker.
        prefill_blocks: outstanding prefill blocks of those reservations.
        decode_blocks: decode blocks of those reservations.
    """

    id: str
    address: str
    model: str
    role: str
    engine: str
    version: str
    draining: bool
    set_aside: str
    running: int
    waiting: int
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    step_ms: float
    booked: int
    prefill_blocks: float
    decode_blocks: float


async def worker_states(
    routers: ReplicaSet[router_pb2_grpc.RouterAsyncStub], timeout_s: float
) -> Sequence[WorkerState]:
    """Returns the state of every worker that the router lists; raises SluiceError when no router responds."""
    listed, booked = await asyncio.gather(
        routers.call(lambda stub: stub.ListWorkers, router_pb2.ListWorkersRequest(), timeout_s),
        routers.call(lambda stub: stub.GetLoads, router_pb2.GetLoadsRequest(), timeout_s),
    )
    by_worker: dict[str, list[router_pb2.BookedLoad]] = defaultdict(list)
    for load in booked.loads:
        by_worker[load.worker_id].append(load)
    return [_state(worker, by_worker[worker.worker_id]) for worker in listed.workers]


def _state(worker: router_pb2.WorkerInfo, booked: Sequence[router_pb2.BookedLoad]) -> WorkerState:
    load, card = worker.load, worker.card
    return WorkerState(
        id=worker.worker_id,
        address=worker.address,
        model=card.model,
        role=_ROLES.get(worker.role, "aggregated"),
        engine=worker.engine,
        version=worker.engine_version,
        draining=worker.draining,
        set_aside=worker.set_aside,
        running=load.running_requests,
        waiting=load.waiting_requests,
        used_blocks=load.used_blocks,
        cached_blocks=load.cached_blocks,
        total_blocks=card.total_blocks * max(card.data_parallel_size, 1),
        step_ms=round(load.step_ms, 2),
        booked=sum(one.requests for one in booked),
        prefill_blocks=round(sum(one.prefill_blocks for one in booked), 1),
        decode_blocks=round(sum(one.decode_blocks for one in booked), 1),
    )
