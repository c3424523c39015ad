"""What the gateway makes of every answer, and of every failure to answer, of its router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, NoAnswerError, SluiceError, no_answer
from services.common.base.tasks import TaskOwner
from services.common.rpc.errors import DETAIL_KEY, from_rpc_error, passed_on, status_of, to_detail
from services.gateway.backends.placement.interfaces import AllWorkers, PlacementRequest
from services.gateway.backends.placement.selector import (
    ROUTER_UNAVAILABLE,
    STALE_ROUTER_CODES,
    UNDECIDED_CODES,
    WorkerSelector,
)
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core.deadlines import NO_DEADLINE
from services.gateway.core.request import Role, Route, TokenizedPrompt
from services.gateway.core.routing_hints import NO_HINTS
from tests.support.servers.survival import Bookings

NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
DECISION_CODES = ("", "no_prefill_workers", "overloaded", "workers_excluded", "policy_failed", "service_unavailable")
PROMPT = TokenizedPrompt(b"\1\0\0\0", b"", "", b"", b"", 100, b"")
REQUEST: Any = SimpleNamespace(
    model="m", hints=NO_HINTS, needs=(), lora="", engine_text=False, cache_salt="", priority=0, session_id=""
)


class FailingRouter:
    """Fails every query."""

    def __init__(self, error: SluiceError) -> None:
        self.error = error

    async def route(self, *_: Any, **__: Any) -> Route:
        raise self.error


async def ask(error: SluiceError) -> Route:
    """Asks a router that fails with an error; the model has a decode worker that can run the request alone."""
    entry = WorkerEntry("d", "h:1", 1, "m", 16, 100, 100, frozenset({"local_prefill"}), 0, role=Role.DECODE)
    registry: Any = SimpleNamespace(workers={"d": entry}, of_model=lambda model: [entry], doubted=False)
    connections: Any = SimpleNamespace(
        sound=lambda worker_id: True,
        least_busy=lambda ids: SimpleNamespace(worker_id=ids[0]) if ids else None,
    )
    tasks = TaskOwner()
    selector = WorkerSelector(FailingRouter(error), Bookings(), registry, connections, tasks)
    try:
        return await selector.ask(PlacementRequest(REQUEST, "r", PROMPT, 16, 0, NO_DEADLINE))
    finally:
        await tasks.close()


def sent(error: SluiceError) -> SluiceError:
    """Returns an error as its caller gets it over gRPC."""
    trailing = grpc.aio.Metadata((DETAIL_KEY, to_detail(error).SerializeToString()))
    failure = grpc.aio.AioRpcError(status_of(error.kind), grpc.aio.Metadata(), trailing)
    return passed_on(from_rpc_error(failure, "router"), "router service")


def lost(status: grpc.StatusCode) -> SluiceError:
    failure = grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata())
    return passed_on(from_rpc_error(failure, "router"), "router service")


@settings(max_examples=60)
@given(st.sampled_from(ErrorKind), st.sampled_from(DECISION_CODES) | st.from_regex(r"[a-z_]{1,20}", fullmatch=True))
@example(ErrorKind.UNAVAILABLE, "no_prefill_workers")
@example(ErrorKind.UNAVAILABLE, "workers_excluded")
async def test_error_that_the_router_sends_reaches_the_client(kind: ErrorKind, code: str) -> None:
    if code in (*UNDECIDED_CODES, *STALE_ROUTER_CODES):
        return
    error = sent(SluiceError(kind, "Decided.", code=code))
    if error.code in UNDECIDED_CODES:  # the router refused the gateway, not the request
        return
    with pytest.raises(SluiceError) as raised:
        await ask(error)
    assert raised.value is error


@pytest.mark.parametrize("code", UNDECIDED_CODES)
async def test_router_that_does_not_decide_is_replaced_by_the_least_busy_worker(code: str) -> None:
    assert (await ask(sent(SluiceError(ErrorKind.UNAVAILABLE, "Wait.", code=code)))).degraded == ROUTER_UNAVAILABLE


@pytest.mark.parametrize("status", [status for status in grpc.StatusCode if status is not grpc.StatusCode.OK])
async def test_fallback_depends_on_whether_the_transport_failed(status: grpc.StatusCode) -> None:
    error = lost(status)
    assert isinstance(error, NoAnswerError) == (status in NO_ANSWER)
    if status in NO_ANSWER or error.code in UNDECIDED_CODES:
        assert (await ask(error)).degraded == ROUTER_UNAVAILABLE
    else:
        with pytest.raises(SluiceError):
            await ask(error)


async def test_query_without_a_router_runs_on_the_least_busy_worker() -> None:
    route = await ask(no_answer("No router replica is ready; retry shortly."))
    assert (route.worker_id, route.degraded) == ("d", ROUTER_UNAVAILABLE)


class AheadRouter:
    """Prefers a worker of which the gateway does not know yet; notes the candidates of each query."""

    def __init__(self) -> None:
        self.asked: list[list[str] | None] = []

    async def route(self, placement_request: PlacementRequest, workers: Any) -> Route:
        named = None if isinstance(workers, AllWorkers) else [worker.worker_id for worker in workers]
        self.asked.append(named)
        return Route("new" if named is None else named[0], reservation_id=placement_request.reservation)


async def test_worker_that_only_the_router_knows_is_not_chosen_again() -> None:
    entry = WorkerEntry("known", "h:1", 1, "m", 16, 100, 100, frozenset(), 0)
    registry: Any = SimpleNamespace(workers={"known": entry}, of_model=lambda model: (entry,), doubted=False)

    async def ready(timeout_s: float) -> None:
        return

    def worker(worker_id: str) -> Any:
        if worker_id == "known":
            return SimpleNamespace(worker_id=worker_id, ready=ready)
        raise SluiceError(ErrorKind.CANNOT_CONNECT, f"Worker {worker_id} is not registered with this gateway.")

    freed: list[str] = []
    tasks, router, reservations = TaskOwner(), AheadRouter(), cast(Any, SimpleNamespace(free=freed.append))
    selector = WorkerSelector(
        router, reservations, registry, cast(Any, SimpleNamespace(sound=bool, worker=worker)), tasks
    )
    placement = await selector.place(PlacementRequest(REQUEST, "r", PROMPT, 16, 0, NO_DEADLINE))
    await tasks.close()
    assert placement.route.worker_id == "known"
    assert router.asked == [None, ["known"]]
    assert freed == ["r"]
