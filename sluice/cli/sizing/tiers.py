"""The load of every tier of a running suite, as its routers know it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import grpc

from services.common.base.errors import SluiceError
from services.common.rpc.errors import from_rpc_error
from services.common.rpc.replicas import Replica
from services.common.types.scaling import TierLoad
from sluice.cli.live.client import TIMEOUT_S, NotReached, Running
from sluice.v1 import common_pb2, router_pb2, router_pb2_grpc

_ROLES = {common_pb2.WORKER_ROLE_PREFILL: "prefill", common_pb2.WORKER_ROLE_DECODE: "decode"}
AGGREGATED = "aggregated"


class WorkerTier(NamedTuple):
    """The workers of one model with one role: prefill, decode or aggregated."""

    model: str
    role: str


async def tier_loads(running: Running) -> Mapping[WorkerTier, TierLoad]:
    """Returns the load of each tier, in order; a model without workers for which requests wait has an aggregated one.

    Each router has a queue of its own, so all of them are asked for those; one of them for the rest, which they share.

    Raises:
        NotReached: no router responds.
    """
    routers = await running.routers()
    try:
        workers = await routers.call(lambda stub: stub.ListWorkers, router_pb2.ListWorkersRequest(), TIMEOUT_S)
        loads = await routers.call(lambda stub: stub.GetLoads, router_pb2.GetLoadsRequest(), TIMEOUT_S)
        queues = await asyncio.gather(*(_queues(replica) for replica in routers.serving))
    except SluiceError as error:
        raise NotReached(f"The router reports: {error.message}") from error
    return loads_of(workers.workers, loads.loads, chain.from_iterable(queues))


async def _queues(replica: Replica[router_pb2_grpc.RouterAsyncStub]) -> Sequence[router_pb2.WaitingQueue]:
    try:
        answer = await replica.stub.GetQueues(router_pb2.GetQueuesRequest(), timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "router") from error
    return answer.queues


def loads_of(
    workers: Iterable[router_pb2.WorkerInfo],
    loads: Iterable[router_pb2.BookedLoad],
    queues: Iterable[router_pb2.WaitingQueue],
) -> Mapping[WorkerTier, TierLoad]:
    """Returns the load of each tier from a router's answers; workers that receive no requests do not count.

    A waiting request counts for every tier of its model, because it needs a worker of each.
    """
    members: dict[WorkerTier, list[router_pb2.WorkerInfo]] = {}
    for worker in workers:
        tier = WorkerTier(worker.card.model, _ROLES.get(worker.role, AGGREGATED))
        receiving = members.setdefault(tier, [])
        if not (worker.draining or worker.set_aside):
            receiving.append(worker)
    waiting: dict[str, int] = {}
    for queue in queues:
        waiting[queue.model] = waiting.get(queue.model, 0) + queue.requests
    for model in waiting.keys() - {tier.model for tier in members}:
        members[WorkerTier(model, AGGREGATED)] = []
    booked: dict[str, list[router_pb2.BookedLoad]] = {}
    for load in loads:
        booked.setdefault(load.worker_id, []).append(load)
    return {tier: _load(members[tier], booked, waiting.get(tier.model, 0)) for tier in sorted(members)}


def _load(
    workers: Sequence[router_pb2.WorkerInfo], booked: Mapping[str, Sequence[router_pb2.BookedLoad]], waiting: int
) -> TierLoad:
    pairs = [(worker.card, load) for worker in workers for load in booked.get(worker.worker_id, ())]
    return TierLoad(
        workers=len(workers),
        requests=sum(load.requests for _, load in pairs),
        waiting=waiting,
        prefill_tokens=sum(load.prefill_blocks * card.block_size for card, load in pairs),
        decode_blocks=sum(load.decode_blocks for _, load in pairs),
        max_sequences=_mean([_ranks(worker) * worker.card.max_sequences for worker in workers]),
        max_batched_tokens=_mean([_ranks(worker) * worker.card.max_batched_tokens for worker in workers]),
        total_blocks=_mean([_ranks(worker) * worker.card.total_blocks for worker in workers]),
    )


def _ranks(worker: router_pb2.WorkerInfo) -> int:
    return max(worker.card.data_parallel_size, 1)


def _mean(capacities: Sequence[int]) -> float:
    """Returns the mean of the known capacities; 0 if none is known."""
    known = [capacity for capacity in capacities if capacity]
    return sum(known) / len(known) if known else 0.0
