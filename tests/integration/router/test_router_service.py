"""The router over gRPC with the memory store and fake workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u32, pack_u64, unpack_u64
from services.common.types.hashing import block_hashes
from sluice.v1 import common_pb2, router_pb2
from tests.support.clients.callers import RESERVE, prompt, query, refused
from tests.support.servers.router_cluster import BLOCK, MODEL, FakeWorker, RouterProcess, routers
from tests.support.waiting import until


@pytest.fixture
async def router() -> AsyncIterator[RouterProcess]:
    async with routers(drain_s=5, lease_ms=60_000) as (replica,):
        yield replica


async def attached(router: RouterProcess, *names: str, **card: Any) -> list[FakeWorker]:
    workers = [FakeWorker(name, **card) for name in names]
    for worker in workers:
        await worker.attach(router)
    return workers


SHARED = list(range(2_000))
FIRST, SECOND, OTHER = [*SHARED, *range(5_000, 5_050)], [*SHARED, *range(6_000, 6_050)], list(range(9_000, 11_000))


async def test_requests_that_share_a_prefix_meet_and_a_different_one_goes_elsewhere(router: RouterProcess) -> None:
    workers = {worker.worker_id: worker for worker in await attached(router, "a", "b")}
    first = await router.stub.RouteQuery(query(prompt(*FIRST), "r1"))
    assert first.tokens_to_compute == len(FIRST)
    assert first.overlap == router_pb2.Overlap()
    await workers[first.decode.worker_id].store(block_hashes(FIRST, BLOCK))
    await router.stub.MarkPrefillComplete(router_pb2.MarkPrefillCompleteRequest(reservation_ids=[first.reservation_id]))
    second = await router.stub.RouteQuery(query(prompt(*SECOND), "r2"))
    assert second.decode.worker_id == first.decode.worker_id
    assert second.overlap.device_blocks == len(SHARED) // BLOCK
    assert second.tokens_to_compute == len(SECOND) - len(SHARED)
    assert second.degraded == ""
    third = await router.stub.RouteQuery(query(prompt(*OTHER), "r3"))
    assert third.decode.worker_id != first.decode.worker_id
    freed = await router.stub.FreeRequest(
        router_pb2.FreeRequestRequest(
            reservation_ids=[first.reservation_id, second.reservation_id, third.reservation_id, "tekken:none"]
        )
    )
    assert freed.unknown == 1
    loads = (await router.stub.GetLoads(router_pb2.GetLoadsRequest())).loads
    assert [(load.worker_id, load.requests, load.prefill_blocks, load.decode_blocks) for load in loads] == [
        ("a", 0, 0, 0),
        ("b", 0, 0, 0),
    ]


async def test_the_answer_is_complete(router: RouterProcess) -> None:
    a, _ = await attached(router, "a", "b")
    await a.store(block_hashes(FIRST, BLOCK))
    even = router_pb2.CostOverrides(prefill_load_scale=1)
    answer = await router.stub.RouteQuery(query(prompt(*FIRST), explain=True, cost=even))
    assert (answer.decode.worker_id, answer.decode.address) == ("a", "a.test:50051")
    assert not answer.HasField("prefill")
    assert (answer.reservation_id, answer.expires_unix_ms, answer.best_overlap_blocks) == ("", 0, 128)
    assert answer.headers["x-gateway-destination-endpoint"] == "a.test:50051"
    assert answer.headers["x-dynamo-worker-instance-id"] == "a"
    # 129 blocks: a computes one and adds one, b computes and adds all.
    assert [(score.worker_id, score.cost) for score in answer.scores] == [("a", 2), ("b", 258)]


async def test_overrides_policies_and_candidates(router: RouterProcess) -> None:
    a, _ = await attached(router, "a", "b")
    await a.store(block_hashes(FIRST, BLOCK))
    stub = router.stub
    answer = await stub.RouteQuery(query(prompt(*FIRST), candidates=router_pb2.CandidateSet(worker_ids=["b", "x"])))
    assert answer.decode.worker_id == "b"
    assert answer.best_overlap_blocks == 0
    turns = [(await stub.RouteQuery(query(prompt(1), policy="round_robin"))).decode.worker_id for _ in range(4)]
    assert turns in (["a", "b", "a", "b"], ["b", "a", "b", "a"])
    for policy in ("random", "least_loaded", "power_of_two"):
        seen = {(await stub.RouteQuery(query(prompt(*FIRST), policy=policy))).decode.worker_id for _ in range(60)}
        assert seen == {"a", "b"}, policy
    named = query(prompt(1), policy="direct", candidates=router_pb2.CandidateSet(worker_ids=["b"]))
    assert (await stub.RouteQuery(named)).decode.worker_id == "b"
    hot = query(prompt(*FIRST), cost=router_pb2.CostOverrides(temperature=1000.0))
    assert {(await stub.RouteQuery(hot)).decode.worker_id for _ in range(60)} == {"a", "b"}


async def test_refusals_say_what_is_wrong(router: RouterProcess) -> None:
    stub = router.stub
    error = await refused(stub.RouteQuery(query(prompt(1))))
    assert (error.kind, error.code) == (ErrorKind.UNAVAILABLE, "no_workers")
    (worker,) = await attached(router, "a")
    error = await refused(stub.RouteQuery(query(prompt(1), model="nope")))
    assert (error.kind, error.code, error.param) == (ErrorKind.NOT_FOUND, "model_not_found", "model")
    assert MODEL in error.message
    hashes = pack_u64([1, 2])
    cases = [
        (query(prompt(1), candidates=router_pb2.CandidateSet()), ErrorKind.FAILED_PRECONDITION, "candidates"),
        (query(prompt(1), candidates=router_pb2.CandidateSet(worker_ids=["x"])), ErrorKind.UNAVAILABLE, ""),
        (query(prompt(1), policy="best"), ErrorKind.INVALID_ARGUMENT, "policy"),
        (query(router_pb2.PromptRef(token_ids=b"abc")), ErrorKind.INVALID_ARGUMENT, "prompt.token_ids"),
        (
            query(router_pb2.PromptRef(block_hashes=b"abc", block_size=BLOCK)),
            ErrorKind.INVALID_ARGUMENT,
            "prompt.block_hashes",
        ),
        (
            query(router_pb2.PromptRef(block_hashes=hashes, block_size=32)),
            ErrorKind.FAILED_PRECONDITION,
            "prompt.block_size",
        ),
        (query(router_pb2.PromptRef(block_hashes=hashes)), ErrorKind.INVALID_ARGUMENT, "prompt.block_size"),
        (
            query(router_pb2.PromptRef(block_hashes=hashes, block_size=BLOCK, hash_scheme="md5")),
            ErrorKind.INVALID_ARGUMENT,
            "prompt.hash_scheme",
        ),
        (
            query(router_pb2.PromptRef(block_hashes=hashes, block_size=BLOCK, token_ids=pack_u32([1]))),
            ErrorKind.INVALID_ARGUMENT,
            "prompt",
        ),
        (query(prompt(1), mode=RESERVE), ErrorKind.INVALID_ARGUMENT, "request_id"),
        (
            query(prompt(1), cost=router_pb2.CostOverrides(host_credit=2)),
            ErrorKind.INVALID_ARGUMENT,
            "cost.host_credit",
        ),
    ]
    for request, kind, param in cases:
        error = await refused(stub.RouteQuery(request))
        assert (error.kind, error.param) == (kind, param), request
    await worker.detach()
    await until(lambda: _gone(router))
    error = await refused(stub.RouteQuery(query(prompt(1))))
    assert (error.kind, error.code, error.retry_after_ms) == (ErrorKind.UNAVAILABLE, "no_workers", 1000)


async def _gone(router: RouterProcess) -> bool:
    return not (await router.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers


async def test_add_request_books_where_the_caller_says(router: RouterProcess) -> None:
    await attached(router, "a", "b")
    request = router_pb2.AddRequestRequest(request_id="r", model=MODEL, worker_id="b", prompt=prompt(*range(160)))
    added = await router.stub.AddRequest(request)
    assert added.reservation_id
    loads = (await router.stub.GetLoads(router_pb2.GetLoadsRequest())).loads
    assert [(load.worker_id, load.requests, load.prefill_blocks) for load in loads] == [("a", 0, 0), ("b", 1, 10)]
    request.worker_id = "x"
    assert (await refused(router.stub.AddRequest(request))).kind is ErrorKind.NOT_FOUND


async def test_watchers_hear_up_synced_down(router: RouterProcess) -> None:
    kinds = router_pb2.WorkerChange
    (a,) = await attached(router, "a")
    watch = router.stub.WatchWorkers(router_pb2.WatchWorkersRequest(model=MODEL))

    async def heard() -> tuple[int, str, bool]:
        change = await asyncio.wait_for(watch.read(), 20)
        assert isinstance(change, router_pb2.WorkerChange)
        return change.kind, change.worker.worker_id, change.worker.draining

    assert await heard() == (kinds.KIND_UP, "a", False)
    assert await heard() == (kinds.KIND_SYNCED, "", False)
    (b,) = await attached(router, "b")
    assert await heard() == (kinds.KIND_UP, "b", False)
    await b.leave()
    assert await heard() == (kinds.KIND_DOWN, "b", True)
    for _ in range(5):
        assert (await router.stub.RouteQuery(query(prompt(1)))).decode.worker_id == "a"
    await a.detach()
    assert await heard() == (kinds.KIND_DOWN, "a", False)
    watch.cancel()


async def test_a_lost_worker_takes_its_reservations_and_blocks_along(router: RouterProcess) -> None:
    a, _ = await attached(router, "a", "b")
    await a.store(block_hashes(FIRST, BLOCK))
    assert (await router.stub.RouteQuery(query(prompt(*FIRST), "r1"))).decode.worker_id == "a"
    await a.detach()
    await until(lambda: _alive(router, ["b"]))
    moved = await router.stub.RouteQuery(query(prompt(*FIRST), "r1"))
    assert (moved.decode.worker_id, moved.overlap.device_blocks) == ("b", 0)
    await a.attach(router)
    assert not a.attached or not a.attached.sequences
    loads = (await router.stub.GetLoads(router_pb2.GetLoadsRequest())).loads
    assert [(load.worker_id, load.requests) for load in loads] == [("a", 0), ("b", 1)]


async def _alive(router: RouterProcess, names: list[str]) -> bool:
    listed = await router.stub.ListWorkers(router_pb2.ListWorkersRequest(model=MODEL))
    return [worker.worker_id for worker in listed.workers] == names


async def test_a_gap_is_healed_by_a_snapshot(router: RouterProcess) -> None:
    (a,) = await attached(router, "a")
    hashes = list(block_hashes(FIRST, BLOCK))
    await a.store(hashes[:10])
    a.cache.update(hashes[10:20])
    a.sequence = 2  # this batch never arrives
    await a.store(hashes[20:30])
    assert len(a.resyncs) == 1
    await a.store(hashes[30:40])
    answer = await router.stub.GetOverlaps(router_pb2.GetOverlapsRequest(model=MODEL, prompt=prompt(*FIRST)))
    assert [(each.worker_id, each.overlap.device_blocks) for each in answer.overlaps] == [("a", 40)]


async def test_heartbeats_are_seen_in_lists_and_loads(router: RouterProcess) -> None:
    (a,) = await attached(router, "a")
    await a.heartbeat(running_requests=3, used_blocks=77)

    async def seen() -> bool:
        listed = await router.stub.ListWorkers(router_pb2.ListWorkersRequest())
        return listed.workers[0].load.used_blocks == 77

    await until(seen)
    loads = (await router.stub.GetLoads(router_pb2.GetLoadsRequest())).loads
    assert loads[0].reported.running_requests == 3


async def test_the_index_can_be_dumped(router: RouterProcess) -> None:
    a, _ = await attached(router, "a", "b")
    await a.store([5, 3, 4])
    dump = [message async for message in router.stub.DumpIndex(router_pb2.DumpIndexRequest(model=MODEL))]
    assert [(each.worker_id, list(unpack_u64(each.block_hashes)), each.sequence) for each in dump] == [
        ("a", [3, 4, 5], 1),
        ("b", [], 0),
    ]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (router_pb2.AttachRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (
            router_pb2.AttachRequest(
                events=router_pb2.KvEventBatch(
                    sequence=1,
                    events=[router_pb2.KvEvent(stored=router_pb2.BlocksStored(block_hashes=pack_u64(range(101))))],
                )
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            router_pb2.AttachRequest(
                events=router_pb2.KvEventBatch(
                    sequence=1, events=[router_pb2.KvEvent(stored=router_pb2.BlocksStored(block_hashes=b"abc"))]
                )
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            router_pb2.AttachRequest(events=router_pb2.KvEventBatch(sequence=0)),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            router_pb2.AttachRequest(events=router_pb2.KvEventBatch(data_parallel_rank=1, sequence=1)),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            router_pb2.AttachRequest(snapshot=router_pb2.Snapshot(sequence=1, block_hashes=pack_u64(range(101)))),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            router_pb2.AttachRequest(heartbeat=router_pb2.Heartbeat(loads=[common_pb2.WorkerLoad()] * 2)),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
async def test_a_worker_that_sends_nonsense_is_cut_off(
    router: RouterProcess, message: router_pb2.AttachRequest, code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    (a,) = await attached(router, "bad", total_blocks=100)
    await a.call.write(message)
    await until(lambda: a.ended is not None)
    assert a.ended is not None
    assert a.ended.code() is code
    assert await _gone(router)
    assert any(
        getattr(record, "worker", "") == "bad" and "disconnecting" in record.message for record in caplog.records
    )


async def test_bad_registrations_are_refused(router: RouterProcess) -> None:
    await attached(router, "a")
    for worker, kind in (
        (FakeWorker(""), ErrorKind.INVALID_ARGUMENT),
        (FakeWorker("x", model=""), ErrorKind.INVALID_ARGUMENT),
        (FakeWorker("x", hash_scheme="md5"), ErrorKind.INVALID_ARGUMENT),
        (FakeWorker("x", block_size=32), ErrorKind.FAILED_PRECONDITION),
        (FakeWorker("a", epoch=0), ErrorKind.INVALID_ARGUMENT),
        (FakeWorker("a"), ErrorKind.FAILED_PRECONDITION),
    ):
        assert (await refused(worker.attach(router))).kind is kind


async def test_a_second_attachment_replaces_the_first(router: RouterProcess) -> None:
    (old,) = await attached(router, "a")
    await old.store([1, 2])
    again = FakeWorker("a", epoch=1, same_as=old)
    await again.attach(router)
    assert again.attached is not None
    assert dict(again.attached.sequences) == {0: 2} or dict(again.attached.sequences) == {0: 1}
    await until(lambda: old.ended is not None)
    assert await _alive(router, ["a"])
    newer = FakeWorker("a", epoch=2, same_as=old)
    await newer.attach(router)
    assert newer.attached is not None
    assert dict(newer.attached.sequences) == {}
    dump = [message async for message in router.stub.DumpIndex(router_pb2.DumpIndexRequest())]
    assert [(each.epoch, each.block_hashes) for each in dump] == [(2, b"")]


async def test_a_silent_worker_loses_its_lease() -> None:
    async with routers(lease_ms=300) as (router,):
        (a,) = await attached(router, "a")
        await until(lambda: a.ended is not None)
        assert a.ended is not None
        assert a.ended.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await _gone(router)


async def test_streams_end_at_once_when_the_router_stops() -> None:
    router = RouterProcess(drain_s=600)
    await router.start()
    (a,) = await attached(router, "a")
    watch = router.stub.WatchWorkers(router_pb2.WatchWorkersRequest())
    up, synced = await watch.read(), await watch.read()
    assert isinstance(up, router_pb2.WorkerChange)
    assert up.worker.worker_id == "a"
    assert isinstance(synced, router_pb2.WorkerChange)
    assert synced.kind == router_pb2.WorkerChange.KIND_SYNCED
    end = asyncio.create_task(refused(watch.read()))
    await router.stop()
    assert (await end).code == "stopping"
    assert await a.call.code() is grpc.StatusCode.UNAVAILABLE
