"""Waiting for workers and for capacity, over gRPC, with one replica and with two that share Redis."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from services.router.state.reservations.cost import Limits, Offer
from services.router.state.reservations.table import AllBusy, QueueOrder, ReservationParams
from services.router.state.store.redis import RedisStore
from services.router.state.workers.worker import WorkerRank
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.router_child import RouterChild
from tests.support.servers.router_cluster import MODEL, FakeWorker, RouterProcess, routers
from tests.support.waiting import until

RESERVE = router_pb2.RouteQueryRequest.MODE_SELECT_AND_RESERVE


def query(request_id: str, **fields: Any) -> router_pb2.RouteQueryRequest:
    return router_pb2.RouteQueryRequest(
        mode=RESERVE, request_id=request_id, model=MODEL, prompt=router_pb2.PromptRef(prompt_tokens=64), **fields
    )


def ask(router: RouterProcess, request_id: str, **fields: Any) -> asyncio.Task[router_pb2.RouteQueryResponse]:
    async def call() -> router_pb2.RouteQueryResponse:
        answer: router_pb2.RouteQueryResponse = await router.stub.RouteQuery(query(request_id, **fields), timeout=30)
        return answer

    return asyncio.create_task(call())


async def waiting(router: RouterProcess, model: str = MODEL) -> dict[str, int]:
    answer = await router.stub.GetQueues(router_pb2.GetQueuesRequest())
    return {router_pb2.WaitingQueue.Reason.Name(each.reason): each.requests for each in answer.queues}


async def free(router: RouterProcess, *reservations: str) -> None:
    await router.stub.FreeRequest(router_pb2.FreeRequestRequest(reservation_ids=reservations))


async def test_model_scaled_to_zero_makes_queries_wait_for_its_first_worker() -> None:
    async with routers(models=[MODEL]) as [router]:
        await router.ready()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.stub.RouteQuery(query("now"))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        asked = ask(router, "later", max_wait_for_workers_ms=20_000)
        await until(partial(_waits, router))
        worker = FakeWorker("w")
        await worker.attach(router)
        answer = await asked
        assert (answer.decode.worker_id, answer.waited_ms > 0) == ("w", True)
        assert await waiting(router) == {}
        await worker.detach()


async def test_model_whose_workers_lost_their_connections_makes_queries_wait_for_their_return() -> None:
    """No query asks for that; one for a model whose worker announced to leave is refused at once."""
    async with routers(models=[MODEL]) as [router]:
        await router.ready()

        async def attached() -> FakeWorker:
            worker = FakeWorker("w")
            await worker.attach(router)
            return worker

        async def serves_none() -> bool:
            return not (await router.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers

        await (await attached()).detach()
        await until(serves_none)
        asked = ask(router, "meanwhile")
        await until(partial(_waits, router))
        worker = await attached()
        assert (await asked).decode.worker_id == "w"
        await worker.leave()
        await worker.detach()
        await until(serves_none)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.stub.RouteQuery(query("later"))
        assert "No worker serves" in str(refused.value.details())


async def test_wait_for_workers_ends_with_no_workers() -> None:
    async with routers(models=[MODEL], wait_for_workers_ms=50) as [router]:
        await router.ready()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.stub.RouteQuery(query("r"))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "No worker serves" in str(refused.value.details())


async def test_priority_and_deadline_hold_across_replicas(redis: RedisServer) -> None:
    """Every place that becomes free at one replica goes to the first of both queues."""
    async with routers(2, redis_url=redis.url, busy_requests=1) as [one, two]:
        await asyncio.gather(one.ready(), two.ready())
        worker = FakeWorker("w")
        await worker.attach(one)

        async def listed() -> bool:
            return len((await two.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers) == 1

        await until(listed)
        running = (await ask(one, "first")).reservation_id
        patient = {"max_wait_ms": 20_000}
        served: list[str] = []
        asked = []

        def note(name: str, _: asyncio.Task[router_pb2.RouteQueryResponse]) -> None:
            served.append(name)

        def served_more_than(count: int) -> bool:
            return len(served) > count

        for name, router, fields in (
            ("last", one, {"priority": 5}),
            ("plain", two, {}),
            ("due", one, {"first_token_ms": 60_000}),
            ("urgent", two, {"priority": -1}),
        ):
            asked.append(ask(router, name, **patient, **fields))
            asked[-1].add_done_callback(partial(note, name))

        async def queued() -> bool:
            return sum([*(await waiting(one)).values(), *(await waiting(two)).values()]) == 4

        await until(queued)
        for count in range(4):
            await free(one, running)  # at a replica that may not be the one with the first request
            await until(partial(served_more_than, count))
            running = f"{MODEL}:{served[-1]}"
        assert served == ["urgent", "due", "plain", "last"]
        await asyncio.gather(*asked)
        await worker.detach()


async def test_queue_that_waits_longer_precedes_equal_requests_of_other_replicas(redis: RedisServer) -> None:
    one, two = RedisStore(redis.url), RedisStore(redis.url)
    offers = [Offer(WorkerRank("w", 0), 1.0, 1.0, 0, 0, 1_000, Limits(100, 100, 100))]

    async def placed(request_id: str, order: QueueOrder) -> bool:
        try:
            await two.select(MODEL, offers, ReservationParams(request_id, 60_000, order=order))
        except AllBusy:
            return False
        return True

    try:
        await one.announce_queue(MODEL, QueueOrder(waited_ms=10_000))
        assert not await placed("new", QueueOrder())
        assert not await placed("younger", QueueOrder(waited_ms=5_000))
        assert await placed("as-old", QueueOrder(waited_ms=10_000))
        assert await placed("more-important", QueueOrder(priority=-1))
        await one.announce_queue(MODEL, QueueOrder(waited_ms=0))
        assert await placed("soon-after", QueueOrder())
        await one.announce_queue(MODEL, None)
        assert await placed("alone", QueueOrder())
    finally:
        await one.close()
        await two.close()


async def test_queue_of_a_killed_replica_does_not_hold_up_the_others(redis: RedisServer, tmp_path: Path) -> None:
    async with routers(redis_url=redis.url, busy_requests=1, owner_lease_ms=900) as [survivor]:
        await survivor.ready()
        worker = FakeWorker("w")
        await worker.attach(survivor)
        worker.keep_beating()
        child = RouterChild(tmp_path, "--redis-url", redis.url, "--busy-requests", "1")
        await child.start()
        running = (await ask(survivor, "first")).reservation_id

        async def knows() -> bool:
            return bool((await child.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers)

        await until(knows)
        channel = open_channel(f"127.0.0.1:{child.port}")
        call = router_pb2_grpc.RouterStub(channel).RouteQuery(query("urgent", priority=-9, max_wait_ms=60_000))
        urgent = asyncio.ensure_future(call)

        async def queued() -> bool:
            return bool((await child.stub.GetQueues(router_pb2.GetQueuesRequest())).queues)

        await until(queued)
        patient = ask(survivor, "patient", max_wait_ms=60_000)
        await until(lambda: _waits(survivor))
        await child.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await urgent
        await channel.close()
        await free(survivor, running)
        assert (await patient).decode.worker_id == "w"
        await worker.detach()


async def _waits(router: RouterProcess) -> bool:
    return bool(await waiting(router))


async def test_event_and_metric_say_what_waits_for_what(tmp_path: Path) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    flags = ["--models", MODEL, "--busy-requests", "1", "--metrics-listen", metrics]
    child = RouterChild(tmp_path, *flags)
    await child.start()
    watch = child.stub.WatchQueues(router_pb2.GetQueuesRequest())

    async def next_event() -> list[tuple[str, int, int]]:
        event = await asyncio.wait_for(watch.read(), 20)
        assert isinstance(event, router_pb2.GetQueuesResponse)
        return [(each.model, each.reason, each.requests) for each in event.queues]

    async def gauge() -> list[str]:
        async with httpx.AsyncClient(timeout=20) as client:
            text = (await client.get(f"http://{metrics}/metrics")).text
        return [line for line in text.splitlines() if line.startswith("sluice_router_waiting_queries{")]

    assert await next_event() == []
    patience = {"max_wait_for_workers_ms": 60_000, "max_wait_ms": 60_000}
    asked = [asyncio.ensure_future(child.stub.RouteQuery(query("one", **patience)))]
    assert await next_event() == [(MODEL, router_pb2.WaitingQueue.REASON_WORKERS, 1)]
    assert [line.split()[-1] for line in await gauge() if 'for="workers"' in line and f'"{MODEL}"' in line] == ["1.0"]
    worker = FakeWorker("w")
    await worker.attach(child)
    assert (await asked[0]).decode.worker_id == "w"
    assert await next_event() == []
    asked.append(asyncio.ensure_future(child.stub.RouteQuery(query("two", **patience))))
    assert await next_event() == [(MODEL, router_pb2.WaitingQueue.REASON_CAPACITY, 1)]
    assert [line.split()[-1] for line in await gauge() if 'for="capacity"' in line] == ["1.0"]
    asked[1].cancel()
    assert await next_event() == []
    assert await gauge() == []
    watch.cancel()
    await worker.detach()
    await child.stop()
