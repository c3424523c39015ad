"""Reports of requests on the session of their queries, and beside it with a router that takes none there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from services.common.base.errors import ErrorKind
from services.common.rpc.call_server import MultiplexedCallServer
from services.common.rpc.errors import from_rpc_error
from services.common.rpc.multiplexed_call import MultiplexedCall
from services.router.rpc import service
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.servers.router_cluster import MODEL, FakeWorker, RouterProcess, routers
from tests.support.waiting import until

DEADLINE_S = 20.0
REPORTS = {"FreeRequest": ("free", "freed"), "MarkPrefillComplete": ("mark_prefill_complete", "marked")}


class Calls:
    """A stub whose queries and reports share a session; `unary` has the names of the reports that do not."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub: Any = router_pb2_grpc.RouterStub(channel)
        self.unary: list[str] = []
        calls = router_pb2.RouteCall, router_pb2.RouteCalls
        self.query: MultiplexedCall[Any, Any] = MultiplexedCall("router", stub.RouteQuery, stub.Session, *calls)
        self.free, self.mark = (
            self.query.beside(partial(self._unary, name, getattr(stub, name)), *fields, "reports")
            for name, fields in REPORTS.items()
        )

    def _unary(self, name: str, method: Any, request: Any, **options: Any) -> Any:
        self.unary.append(name)
        return method(request, **options)


@asynccontextmanager
async def session(router: RouterProcess) -> AsyncIterator[Calls]:
    """Keeps the session of a stub open."""
    calls = Calls(router.channel)
    calls.query.welcome(True)
    running = asyncio.ensure_future(calls.query.run())
    try:
        await until(lambda: calls.query._announced is not None)
        yield calls
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def reserved(calls: Calls) -> str:
    """Reserves a prompt of ten blocks; returns the id of the reservation."""
    query = router_pb2.RouteQueryRequest(
        mode=router_pb2.RouteQueryRequest.MODE_SELECT_AND_RESERVE,
        request_id="r",
        model=MODEL,
        prompt=router_pb2.PromptRef(prompt_tokens=160),
    )
    return str((await calls.query(query, timeout=DEADLINE_S)).reservation_id)


async def load(router: RouterProcess) -> tuple[int, float]:
    """Returns the requests of all workers, and their blocks that are not computed."""
    loads = (await router.stub.GetLoads(router_pb2.GetLoadsRequest())).loads
    return sum(one.requests for one in loads), sum(one.prefill_blocks for one in loads)


@pytest.mark.parametrize("announced", [True, False], ids=["on-the-session", "router-that-takes-none-there"])
async def test_reports_of_a_request_release_what_its_query_reserved(
    announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not announced:  # as a router before they were

        def without(*args: Any, greeting: Any, **options: Any) -> MultiplexedCallServer:
            return MultiplexedCallServer(*args, **options)

        monkeypatch.setattr(service, "MultiplexedCallServer", without)
    async with routers() as (router,), session(router) as calls:
        worker = FakeWorker("w")
        await worker.attach(router)
        reservation = await reserved(calls)
        assert await load(router) == (1, 10)
        marked = router_pb2.MarkPrefillCompleteRequest(reservation_ids=[reservation, "no"])
        assert (await calls.mark(marked, timeout=DEADLINE_S)).unknown == 1
        assert await load(router) == (1, 0)
        outcome = router_pb2.RequestOutcome(reservation_id=reservation, output_tokens=7)
        freed = router_pb2.FreeRequestRequest(reservation_ids=[reservation, "no", "nor"], outcomes=[outcome])
        assert (await calls.free(freed, timeout=DEADLINE_S)).unknown == 2
        assert await load(router) == (0, 0)
        decisions = (await router.stub.GetDecisions(router_pb2.GetDecisionsRequest())).decisions
        assert [decision.output_tokens for decision in decisions] == [7]
        assert calls.unary == ([] if announced else ["MarkPrefillComplete", "FreeRequest"])
        await worker.detach()


async def test_a_report_that_fails_on_the_session_raises_the_error_of_the_unary_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(self: Any, request: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr(service.RouterService, "_free", fail)
    async with routers() as (router,), session(router) as calls:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await calls.free(router_pb2.FreeRequestRequest(reservation_ids=["r"]), timeout=DEADLINE_S)
        error = from_rpc_error(raised.value, "router")
        assert error.kind is ErrorKind.INTERNAL
        assert "secret" not in error.message
        assert not calls.unary
