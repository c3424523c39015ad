"""Owners, progress, decisions and bursts over gRPC, with two replicas on one Redis."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import pytest

from services.common.base.packing import pack_u32
from services.common.types.hashing import block_hashes
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.backends.workers.registry import WorkerRegistry
from services.gateway.core.request import Route, TokenizedPrompt
from sluice.v1 import router_pb2
from tests.support.clients.callers import prompt, query
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.router_cluster import BLOCK, MODEL, FakeWorker, RouterProcess, routers
from tests.support.servers.session_peer import session_peer
from tests.support.waiting import until

LEASE_MS = 3_000


@pytest.fixture
async def pair(redis: RedisServer) -> AsyncIterator[list[RouterProcess]]:
    async with routers(2, redis_url=redis.url, redis_timeout_s=5, owner_lease_ms=LEASE_MS, drain_s=5) as replicas:
        for replica in replicas:
            await until(partial(ready, replica.stub))
        yield replicas


async def ready(stub: Any) -> bool:
    call = stub.ListWorkers(router_pb2.ListWorkersRequest())
    return bool(await call.code() is grpc.StatusCode.OK)


def reserve(request_id: str, tokens: list[int] | range = range(640), **more: Any) -> router_pb2.RouteQueryRequest:
    return query(prompt(*tokens), request_id, **more)


async def workers(pair: list[RouterProcess], *names: str, **card: Any) -> list[FakeWorker]:
    made = [FakeWorker(name, **card) for name in names]
    for worker in made:
        await worker.attach(pair[0])
        worker.keep_beating()
    for replica in pair:

        async def knows(stub: Any = replica.stub) -> bool:
            listed = (await stub.ListWorkers(router_pb2.ListWorkersRequest())).workers
            return {worker.worker_id for worker in listed} >= set(names)

        await until(knows)
    return made


async def loads(replica: RouterProcess) -> list[router_pb2.BookedLoad]:
    return list((await replica.stub.GetLoads(router_pb2.GetLoadsRequest())).loads)


async def booked(replica: RouterProcess) -> int:
    return sum(load.requests for load in await loads(replica))


class Lease:
    """An owner's stream at one replica."""

    def __init__(self, replica: RouterProcess, owner: str) -> None:
        self._call = replica.stub.WatchWorkers(router_pb2.WatchWorkersRequest(owner=owner))
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for _ in self._call:
            pass

    async def end(self) -> None:
        self._call.cancel()
        await asyncio.wait([self._reading])


async def test_what_an_owner_booked_goes_with_its_lease_and_outlives_a_move_to_another_replica(
    pair: list[RouterProcess],
) -> None:
    await workers(pair, "a")
    here, there = pair
    first = Lease(here, "gateway-1")
    for number in range(3):
        await pair[number % 2].stub.RouteQuery(reserve(f"mine-{number}", owner="gateway-1"))
    added = router_pb2.AddRequestRequest(
        request_id="added", model=MODEL, worker_id="a", prompt=prompt(1, 2), owner="gateway-1"
    )
    await there.stub.AddRequest(added)
    await here.stub.RouteQuery(reserve("nobodys"))
    await asyncio.sleep(2 * LEASE_MS / 1000)
    assert await booked(here) == 5, "the stream is the lease"
    await first.end()
    second = Lease(there, "gateway-1")
    await asyncio.sleep(2 * LEASE_MS / 1000)
    assert await booked(here) == 5, "coming back in time at another replica keeps it"
    await second.end()

    async def only_nobodys_is_left() -> bool:
        return await booked(here) == 1

    await until(only_nobodys_is_left)
    ids = [f"{MODEL}:mine-{number}" for number in range(3)] + [f"{MODEL}:added", f"{MODEL}:nobodys"]
    freed = await there.stub.FreeRequest(router_pb2.FreeRequestRequest(reservation_ids=ids))
    assert freed.unknown == 4
    assert [(load.requests, load.prefill_blocks, load.decode_blocks) for load in await loads(there)] == [(0, 0, 0)]


async def test_an_owner_without_a_stream_lives_by_its_bookings(pair: list[RouterProcess]) -> None:
    await workers(pair, "a")
    await pair[0].stub.RouteQuery(reserve("r1", owner="silent"))
    assert await booked(pair[1]) == 1

    async def gone() -> bool:
        return await booked(pair[1]) == 0

    await until(gone)


async def test_progress_grows_decode_load_once_on_any_replica(pair: list[RouterProcess]) -> None:
    await workers(pair, "a")
    answer = await pair[0].stub.RouteQuery(reserve("r1", range(64), expected_output_tokens=2 * BLOCK))
    assert (await loads(pair[1]))[0].decode_blocks == 6

    async def report(replica: RouterProcess, tokens: int) -> int:
        progress = [
            router_pb2.RequestProgress(reservation_id=answer.reservation_id, output_tokens=tokens),
            router_pb2.RequestProgress(reservation_id=f"{MODEL}:none", output_tokens=tokens),
            router_pb2.RequestProgress(reservation_id="never%20heard:r1", output_tokens=tokens),
            router_pb2.RequestProgress(reservation_id="no id at all", output_tokens=tokens),
        ]
        return (await replica.stub.ReportProgress(router_pb2.ReportProgressRequest(progress=progress))).unknown

    for replica, tokens, blocks in (
        (pair[0], 5, 6),
        (pair[1], 3 * BLOCK, 7),
        (pair[0], 3 * BLOCK, 7),
        (pair[0], 2 * BLOCK + 1, 7),
        (pair[0], 3 * BLOCK + 1, 8),
    ):
        assert await report(replica, tokens) == 3
        assert (await loads(pair[1]))[0].decode_blocks == blocks
    await pair[1].stub.FreeRequest(router_pb2.FreeRequestRequest(reservation_ids=[answer.reservation_id]))
    assert await report(pair[0], 99) == 4
    assert (await loads(pair[0]))[0].decode_blocks == 0


async def test_a_retry_gets_the_same_answer_from_any_replica(pair: list[RouterProcess]) -> None:
    await workers(pair, "a", "b", "c")
    first = await pair[0].stub.RouteQuery(reserve("r1", policy="random"))
    for number in range(12):
        again = await pair[number % 2].stub.RouteQuery(reserve("r1", policy="random"))
        assert (again.decode, again.reservation_id, again.expires_unix_ms) == (
            first.decode,
            first.reservation_id,
            first.expires_unix_ms,
        )
    assert await booked(pair[0]) == 1
    decisions = [await each.stub.GetDecisions(router_pb2.GetDecisionsRequest()) for each in pair]
    assert [len(answer.decisions) for answer in decisions] == [1, 0], "it was decided once"


async def test_unknown_and_foreign_reservations_are_counted(pair: list[RouterProcess]) -> None:
    await workers(pair, "a")
    answer = await pair[0].stub.RouteQuery(reserve("r1", ttl_ms=3_000))
    ids = [f"{MODEL}:other", "elsewhere:r1", "", ":", "nonsense"]
    marked = await pair[1].stub.MarkPrefillComplete(router_pb2.MarkPrefillCompleteRequest(reservation_ids=ids))
    assert marked.unknown == len(ids)
    told = await pair[1].stub.FreeRequest(router_pb2.FreeRequestRequest(reservation_ids=ids))
    assert told.unknown == len(ids)
    assert await booked(pair[0]) == 1

    async def expired() -> bool:
        return await booked(pair[1]) == 0

    await until(expired)
    freed = router_pb2.FreeRequestRequest(reservation_ids=[answer.reservation_id])
    assert (await pair[1].stub.FreeRequest(freed)).unknown == 1


async def test_decisions_tell_what_was_predicted_possible_and_delivered(pair: list[RouterProcess]) -> None:
    (a, _) = await workers(pair, "a", "b", capabilities=["kv_events"])
    stub = pair[0].stub
    await a.store(block_hashes(range(640), BLOCK))
    only_b = router_pb2.CandidateSet(worker_ids=["b"])
    first = await stub.RouteQuery(reserve("r1", range(650)))
    second = await stub.RouteQuery(reserve("r2", range(650), policy="round_robin", candidates=only_b))
    outcomes = [
        router_pb2.RequestOutcome(reservation_id=first.reservation_id, cached_tokens=320, output_tokens=7),
        router_pb2.RequestOutcome(reservation_id=f"{MODEL}:none", cached_tokens=1),
    ]
    ids = [first.reservation_id]
    await stub.FreeRequest(router_pb2.FreeRequestRequest(reservation_ids=ids, outcomes=outcomes))
    newer, older = (await stub.GetDecisions(router_pb2.GetDecisionsRequest())).decisions
    assert (older.request_id, older.reservation_id, older.decode, older.model) == (
        "r1",
        first.reservation_id,
        first.decode,
        MODEL,
    )
    assert (older.prompt_tokens, older.predicted_cached_tokens, older.best_cached_tokens) == (650, 640, 640)
    assert (older.delivered_cached_tokens, older.output_tokens, older.policy) == (320, 7, "kv")
    assert older.decision_us > 0
    assert abs(older.decided_unix_ms - first.expires_unix_ms + 600_000) < 60_000
    assert (newer.request_id, newer.decode.worker_id, newer.policy) == ("r2", "b", "round_robin")
    assert newer.reservation_id == second.reservation_id
    assert (newer.predicted_cached_tokens, newer.HasField("delivered_cached_tokens")) == (0, False)
    limited = await stub.GetDecisions(router_pb2.GetDecisionsRequest(model=MODEL, limit=1))
    assert [each.request_id for each in limited.decisions] == ["r2"]
    assert not (await stub.GetDecisions(router_pb2.GetDecisionsRequest(model="other"))).decisions


async def test_a_burst_of_siblings_goes_to_one_worker(pair: list[RouterProcess]) -> None:
    made = await workers(pair, "a", "b", "c", "d", capabilities=["kv_events"])
    stub, shared = pair[0].stub, range(200 * BLOCK)
    answers = await asyncio.gather(
        *(stub.RouteQuery(reserve(f"r{n}", [*shared, *([10_000 + n] * 20)])) for n in range(16))
    )
    (chosen,) = {answer.decode.worker_id for answer in answers}
    assert sorted(answer.overlap.predicted_blocks for answer in answers) == [0] + [200] * 15
    assert all(answer.overlap.device_blocks == 0 for answer in answers)
    load = next(load for load in await loads(pair[1]) if load.worker_id == chosen)
    assert (load.requests, load.prefill_blocks) == (16, 202 + 15 * 2)
    dumped = [dump async for dump in stub.DumpIndex(router_pb2.DumpIndexRequest())]
    assert not any(dump.block_hashes for dump in dumped), "what is predicted is not in the index"
    worker = next(each for each in made if each.worker_id == chosen)
    await worker.store(block_hashes(shared, BLOCK))
    asked = router_pb2.GetOverlapsRequest(model=MODEL, prompt=prompt(*shared))
    (found,) = (await stub.GetOverlaps(asked)).overlaps
    assert (found.worker_id, found.overlap.device_blocks, found.overlap.predicted_blocks) == (chosen, 200, 0)


async def test_an_engine_without_events_is_routed_by_what_was_sent_to_it(pair: list[RouterProcess]) -> None:
    await workers(pair, "a", "b", "c", "d")
    stub, tokens = pair[0].stub, list(range(100 * BLOCK))
    first = await stub.RouteQuery(reserve("t1", tokens))
    await stub.MarkPrefillComplete(router_pb2.MarkPrefillCompleteRequest(reservation_ids=[first.reservation_id]))
    outcome = router_pb2.RequestOutcome(reservation_id=first.reservation_id, cached_tokens=0, output_tokens=3)
    await stub.FreeRequest(router_pb2.FreeRequestRequest(reservation_ids=[first.reservation_id], outcomes=[outcome]))
    tokens += range(50_000, 50_000 + 10 * BLOCK)
    second = await stub.RouteQuery(reserve("t2", tokens))
    assert second.decode == first.decode
    assert (second.overlap.device_blocks, second.overlap.predicted_blocks) == (0, 100)


class Gateway:
    """What a gateway is to the router."""

    def __init__(self, pair: list[RouterProcess], owner: str) -> None:
        self.client = RouterClient([f"127.0.0.1:{replica.port}" for replica in pair], None, 20, owner)
        self.catalogue = WorkerRegistry(self.client.replicas, lambda entry: None, lambda worker_id: None, owner)

    async def start(self) -> None:
        await self.client.replicas.start()
        self._tasks = [asyncio.create_task(self.catalogue.run()), asyncio.create_task(self.client.run_reports())]
        await until(lambda: len(self.client.replicas.serving) == 2 and self.catalogue.synced)

    async def route(self, request_id: str) -> Route:
        tokens = pack_u32(range(64))
        return await self.client.route(request_id, MODEL, TokenizedPrompt(tokens, b"", "", b"", b"", 0, b""), BLOCK)

    async def crash(self) -> None:
        """Its process is gone: connections break, nothing is said."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self.client.replicas.close()


async def test_the_reservations_of_a_crashed_gateway_vanish(pair: list[RouterProcess]) -> None:
    await workers(pair, "a")
    crashing, healthy = Gateway(pair, "gateway-1"), Gateway(pair, "gateway-2")
    for gateway in (crashing, healthy):
        await gateway.start()
        for number in range(4):
            await gateway.route(f"{gateway.client.owner}-{number}")
    await asyncio.sleep(2 * LEASE_MS / 1000)
    assert await booked(pair[0]) == 8
    await crashing.crash()

    async def half_is_left() -> bool:
        return await booked(pair[1]) == 4

    await until(half_is_left)
    await asyncio.sleep(LEASE_MS / 1000)
    assert await booked(pair[0]) == 4
    await healthy.crash()


async def test_whichever_replica_decided_hears_what_became_of_it(pair: list[RouterProcess]) -> None:
    await workers(pair, "a")
    gateway = Gateway(pair, "gateway")
    await gateway.start()
    routes = await asyncio.gather(*(gateway.route(f"r{number}") for number in range(20)))
    for number, route in enumerate(routes):
        gateway.client.free(route.reservation_id, number, 2 * number)
    await gateway.client.flush_reports(20)
    assert await booked(pair[0]) == 0
    records: dict[str, tuple[int, int]] = {}
    for replica in pair:
        answer = await replica.stub.GetDecisions(router_pb2.GetDecisionsRequest())
        records |= {each.request_id: (each.delivered_cached_tokens, each.output_tokens) for each in answer.decisions}
    assert records == {f"r{number}": (number, 2 * number) for number in range(20)}
    await gateway.crash()


async def test_no_owner_loses_anything_while_redis_is_away(pair: list[RouterProcess], redis: RedisServer) -> None:
    await workers(pair, "a")
    held, gone = Lease(pair[0], "held"), Lease(pair[1], "gone")
    for owner in ("held", "gone"):
        await pair[0].stub.RouteQuery(reserve(f"before-{owner}", owner=owner))
    redis.freeze()
    answer = await pair[0].stub.RouteQuery(reserve("meanwhile-held", owner="held"))
    assert answer.degraded == "store_unavailable"
    await pair[1].stub.RouteQuery(reserve("meanwhile-gone", owner="gone"))
    await asyncio.sleep(2 * LEASE_MS / 1000)
    await gone.end()
    redis.thaw()

    async def settled(count: int) -> bool:
        return await booked(pair[0]) == await booked(pair[1]) == count

    await until(lambda: settled(2), timeout_s=40)
    await asyncio.sleep(2 * LEASE_MS / 1000)
    assert await settled(2), "the lease of the one that is there was renewed before anything was cleared"
    ids = [f"{MODEL}:before-held", f"{MODEL}:meanwhile-held"]
    freed = await pair[1].stub.FreeRequest(router_pb2.FreeRequestRequest(reservation_ids=ids))
    assert freed.unknown == 0
    await held.end()


async def test_reservations_of_a_stopped_owner_end_within_the_documented_time() -> None:
    async with routers() as (router,):
        await until(lambda: ready(router.stub))
        await workers([router], "w")
        with session_peer("own", f"127.0.0.1:{router.port}", "owner") as process:
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.readline)
            await router.stub.RouteQuery(reserve("r", owner="owner"))
            assert await booked(router) == 1
            process.send_signal(signal.SIGSTOP)
            stopped_at = time.monotonic()
            while await booked(router) and time.monotonic() - stopped_at < 30:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            assert 1 < time.monotonic() - stopped_at <= 15
