"""Reports of the gateway to the router: collected, sent in one call, and sent again after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from services.common.base.errors import ErrorKind, SluiceError, unavailable
from services.gateway.backends.rpc import router
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.core.request import TokenizedPrompt
from sluice.v1 import router_pb2


class Replica:
    """A router replica that records the calls it receives."""

    def __init__(self) -> None:
        self.stub = self
        self.prefills: list[list[str]] = []
        self.frees: list[router_pb2.FreeRequestRequest] = []
        self.failures = 0
        self.failure = unavailable("The router does not respond.")

    async def MarkPrefillComplete(self, request: router_pb2.MarkPrefillCompleteRequest, timeout: float) -> None:
        self._fail()
        self.prefills.append(list(request.reservation_ids))

    async def FreeRequest(self, request: router_pb2.FreeRequestRequest, timeout: float) -> None:
        self._fail()
        self.frees.append(request)

    async def RouteQuery(self, request: router_pb2.RouteQueryRequest, timeout: float) -> router_pb2.RouteQueryResponse:
        return router_pb2.RouteQueryResponse(reservation_id=request.request_id)

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise self.failure


class Replicas:
    """A replica set that calls its first replica, or the preferred one; with `hedges`, each query goes to all."""

    def __init__(self, *serving: Replica) -> None:
        self.serving = serving
        self.hedges = False

    async def call(
        self,
        method: Callable[[Replica], Callable[..., Awaitable[Any]]],
        request: Any,
        timeout_s: float,
        attempts: int = 2,
        hedge: str = "",
        prefer: Replica | None = None,
    ) -> Any:
        called = self.serving if self.hedges and hedge else (prefer or self.serving[0],)
        answers = [await method(replica)(request, timeout=timeout_s) for replica in called]
        return answers[0]


@pytest.fixture
def replicas() -> Replicas:
    return Replicas(Replica(), Replica())


@pytest.fixture
async def client(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RouterClient]:
    monkeypatch.setattr(router, "REPORT_DELAY_S", 0.0)
    monkeypatch.setattr(router, "REPORT_RETRY_S", 0.0)
    client = RouterClient(["127.0.0.1:1"], None, 5.0)
    client.replicas = cast(Any, replicas)
    reporting = asyncio.create_task(client.run_reports())
    yield client
    reporting.cancel()


async def route(client: RouterClient, request_id: str) -> None:
    await client.route(request_id, "m", TokenizedPrompt(b"", b"", "", b"", b"", 0, b""), 16)


def freed(replica: Replica) -> list[list[str]]:
    return [list(request.reservation_ids) for request in replica.frees]


async def test_outcome_of_a_decision_reaches_only_the_replica_that_decided(
    client: RouterClient, replicas: Replicas
) -> None:
    first, second = replicas.serving
    await route(client, "a")
    replicas.serving = second, first
    await route(client, "b")
    client.prefill_complete("b")
    await client.flush_reports(20)
    client.free("a", 16, 5)
    client.free("b", 0, 6)
    await client.flush_reports(20)
    assert (first.prefills, second.prefills) == ([], [["b"]])
    assert (freed(first), freed(second)) == ([["a"]], [["b"]])
    assert [[each.output_tokens for each in replica.frees[0].outcomes] for replica in (first, second)] == [[5], [6]]


async def test_outcome_of_a_hedged_query_reaches_every_replica(client: RouterClient, replicas: Replicas) -> None:
    replicas.hedges = True
    await route(client, "a")
    client.free("a", 16, 5)
    await client.flush_reports(20)
    assert [freed(replica) for replica in replicas.serving] == [[["a"]], [[]]]


async def test_outcome_that_the_decider_does_not_take_goes_to_another_replica(
    client: RouterClient, replicas: Replicas
) -> None:
    first, second = replicas.serving
    await route(client, "a")
    replicas.serving = second, first
    first.failures = 1
    client.free("a", 16, 5)
    await client.flush_reports(20)
    assert (freed(first), freed(second)) == ([], [["a"]])


async def test_decider_of_a_dropped_outcome_is_forgotten(
    client: RouterClient, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "MAX_PENDING_REPORTS", 0)
    first, second = replicas.serving
    await route(client, "a")
    first.failures = second.failures = 9
    client.free("a", 16, 5)
    await client.flush_reports(20)
    first.failures = second.failures = 0
    replicas.serving = second, first
    client.free("a", 16, 5)
    await client.flush_reports(20)
    assert (freed(first), freed(second)) == ([[]], [["a"]]), "as of a reservation whose decider is unknown"


async def test_outcome_of_a_removed_decider_reaches_the_others(client: RouterClient, replicas: Replicas) -> None:
    _, second = replicas.serving
    await route(client, "a")
    replicas.serving = (second,)
    client.free("a", 16, 5)
    await client.flush_reports(20)
    assert freed(second) == [["a"]]


async def test_outcomes_of_one_tick_reach_every_replica_and_one_releases_them(
    client: RouterClient, replicas: Replicas
) -> None:
    client.free("a", 16, 5)
    client.free("b", None, 0)
    await client.flush_reports(20)
    first, second = replicas.serving
    assert [list(request.reservation_ids) for request in first.frees] == [["a", "b"]]
    assert [list(request.reservation_ids) for request in second.frees] == [[]]
    for replica in replicas.serving:
        (request,) = replica.frees
        assert [(each.reservation_id, each.output_tokens) for each in request.outcomes] == [("a", 5), ("b", 0)]
        assert [each.HasField("cached_tokens") for each in request.outcomes] == [True, False]


async def test_prefill_of_a_request_that_has_ended_is_not_reported(client: RouterClient, replicas: Replicas) -> None:
    client.prefill_complete("a")
    client.prefill_complete("b")
    client.free("a")
    await client.flush_reports(20)
    assert replicas.serving[0].prefills == [["b"]]
    assert [list(request.reservation_ids) for request in replicas.serving[0].frees] == [["a"]]


async def test_reports_that_fail_are_sent_again_with_those_added_meanwhile(
    client: RouterClient, replicas: Replicas
) -> None:
    first = replicas.serving[0]
    first.failures = 3
    client.prefill_complete("a")
    client.free("b", 0, 1)
    await asyncio.sleep(0)
    client.free("c", 0, 2)
    await client.flush_reports(20)
    assert first.failures == 0
    assert [id_ for ids in first.prefills for id_ in ids] == ["a"]
    assert [id_ for request in first.frees for id_ in request.reservation_ids] == ["b", "c"]


async def test_outcome_whose_call_times_out_is_sent_again(client: RouterClient, replicas: Replicas) -> None:
    first = replicas.serving[0]
    first.failures, first.failure = 2, SluiceError(ErrorKind.DEADLINE_EXCEEDED, "The router service timed out.")
    client.free("a", 16, 5)
    await client.flush_reports(20)
    assert [list(request.reservation_ids) for request in first.frees] == [["a"]]
