"""B3: a reservation and its owner belong to the caller that made it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from services.common.base.packing import pack_u32
from services.common.security.tls import PeerCredentials
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.core.request import TokenizedPrompt
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.clients.callers import Calls, now_us, ready_routers
from tests.support.data.tokens import accept, shows
from tests.support.servers.router_cluster import MODEL, FakeWorker
from tests.support.waiting import until


@asynccontextmanager
async def booked(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Calls, Calls, str]]:
    """A gateway and a scheduler at one router, and a reservation of the gateway's."""
    tokens = accept(tmp_path / "accepted", "g gateway", "s scheduler", "w worker")
    async with ready_routers(tokens_file=tokens, **settings) as (router,), AsyncExitStack() as stack:
        gateway, scheduler, worker = (Calls(router.port, token) for token in ("g", "s", "w"))
        for each in (gateway, scheduler, worker):
            stack.push_async_callback(each.channel.close)
        attach = router_pb2_grpc.RouterStub(worker.channel).Attach(metadata=worker._metadata)
        await attach.write(router_pb2.AttachRequest(registration=FakeWorker("w1", epoch=now_us()).registration))
        await attach.read()
        answer = await gateway.ask("RouteQuery", query("r1", owner="gw"))
        yield gateway, scheduler, answer.reservation_id


def query(request_id: str, owner: str = "", tokens: int = 640) -> router_pb2.RouteQueryRequest:
    return router_pb2.RouteQueryRequest(
        mode=router_pb2.RouteQueryRequest.MODE_SELECT_AND_RESERVE,
        request_id=request_id,
        model=MODEL,
        prompt=router_pb2.PromptRef(prompt_tokens=tokens),
        policy="least_loaded",
        owner=owner,
    )


async def load(caller: Calls) -> tuple[int, float, float]:
    """Requests, prefill and decode blocks that are booked."""
    answer = await caller.ask("GetLoads", router_pb2.GetLoadsRequest())
    (one,) = answer.loads
    return one.requests, one.prefill_blocks, one.decode_blocks


async def test_reservation_is_freed_marked_and_reported_on_by_the_caller_that_made_it(tmp_path: Path) -> None:
    async with booked(tmp_path) as (gateway, scheduler, reservation):
        before = await load(gateway)
        assert before[0] == 1
        guesses = [reservation, f"{MODEL}:r1", f"{MODEL}+:gateway/r1", f"{MODEL}:scheduler/r1"]
        progress = [router_pb2.RequestProgress(reservation_id=each, output_tokens=9_999) for each in guesses]
        outcomes = [router_pb2.RequestOutcome(reservation_id=each, cached_tokens=640) for each in guesses]
        for method, request in (
            ("FreeRequest", router_pb2.FreeRequestRequest(reservation_ids=guesses, outcomes=outcomes)),
            ("MarkPrefillComplete", router_pb2.MarkPrefillCompleteRequest(reservation_ids=guesses)),
            ("ReportProgress", router_pb2.ReportProgressRequest(progress=progress)),
        ):
            assert (await scheduler.ask(method, request)).unknown == len(guesses), method
            assert await load(gateway) == before, method
        (decision,) = (await gateway.ask("GetDecisions", router_pb2.GetDecisionsRequest())).decisions
        assert (decision.request_id, decision.reservation_id) == ("r1", reservation)
        assert not decision.HasField("delivered_cached_tokens")
        mine = router_pb2.MarkPrefillCompleteRequest(reservation_ids=[reservation])
        assert (await gateway.ask("MarkPrefillComplete", mine)).unknown == 0
        assert (await load(gateway))[1] == 0
        free = router_pb2.FreeRequestRequest(reservation_ids=[reservation])
        assert (await gateway.ask("FreeRequest", free)).unknown == 0
        assert (await load(gateway))[0] == 0


async def test_reservation_made_on_a_session_is_freed_by_the_same_caller(tmp_path: Path) -> None:
    """Calls that share a stream are calls of the client that opened it."""
    async with booked(tmp_path) as (gateway, _, reservation):
        credentials = PeerCredentials(None, shows("g", "router"))
        client = RouterClient([f"127.0.0.1:{gateway.port}"], credentials, 20, owner="me")
        reporting = asyncio.create_task(client.run_reports())
        await client.replicas.start()
        assert await client.replicas.wait_ready(20)
        prompt = TokenizedPrompt(pack_u32(range(64)), b"", "", b"", b"", 0, b"")
        route = await client.route("r2", MODEL, prompt, 16)
        assert (await load(gateway))[0] == 2
        client.free(route.reservation_id, 0, 5)
        client.free(reservation, 0, 5)
        await client.flush_reports(20)
        assert (await load(gateway))[0] == 0
        reporting.cancel()
        await client.replicas.close()


async def test_request_id_of_another_caller_is_another_request(tmp_path: Path) -> None:
    async with booked(tmp_path) as (gateway, scheduler, reservation):
        theirs = query("r1")
        theirs.candidates.worker_ids.append("w1")  # a retry with other candidates gives up what was booked
        answer = await scheduler.ask("RouteQuery", theirs)
        assert answer.reservation_id != reservation
        assert (await load(gateway))[0] == 2
        added = router_pb2.AddRequestRequest(request_id="r1", model=MODEL, worker_id="w1")
        assert (await scheduler.ask("AddRequest", added)).reservation_id == answer.reservation_id


async def test_owner_named_by_another_caller_is_another_owner(tmp_path: Path) -> None:
    """A scheduler cannot hold a gateway's lease: the gateway is gone, and its reservations go after the lease."""
    async with booked(tmp_path, owner_lease_ms=400, lease_ms=60_000) as (gateway, scheduler, _):
        stub = router_pb2_grpc.RouterStub(scheduler.channel)
        watch = stub.WatchWorkers(router_pb2.WatchWorkersRequest(owner="gw"), metadata=scheduler._metadata)
        await watch.read()

        async def given_back() -> bool:
            return (await load(gateway))[0] == 0

        await until(given_back)
        watch.cancel()
