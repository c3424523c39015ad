"""Descriptions of workers, whose loads are whatever the workers report."""

from __future__ import annotations

from services.common.types.generation import Role
from services.router.rpc.workers import worker_info
from services.router.state.workers.worker import Worker
from sluice.v1 import common_pb2, router_pb2

MAX_U32 = (1 << 32) - 1


def test_worker_info_with_the_highest_loads_of_two_ranks_has_the_highest_number() -> None:
    load = common_pb2.WorkerLoad(
        running_requests=MAX_U32, waiting_requests=MAX_U32, used_blocks=MAX_U32, cached_blocks=MAX_U32, prefill_tokens=7
    )
    heartbeat = router_pb2.Heartbeat(loads=[load, load]).SerializeToString()
    worker = Worker("w", "w:1", 1, "m", Role.AGGREGATED, 16, "scheme", 10, 2, b"")
    total = worker_info(worker, heartbeat).load
    assert (total.running_requests, total.waiting_requests) == (MAX_U32, MAX_U32)
    assert (total.used_blocks, total.cached_blocks, total.prefill_tokens) == (MAX_U32, MAX_U32, 14)
