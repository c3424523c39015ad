"""How a call's time is shared out among the replicas that may have to be asked."""

from __future__ import annotations

from typing import Any

import pytest
from sluice_client import RouterClient
from sluice_client.errors import SluiceError, error_of
from sluice_client.wire import ErrorKind, RouteQueryRequest, RouteQueryResponse, WorkerTarget


class Asked:
    """A replica that answers, or refuses as it is told, and remembers how long it was given."""

    closed = False

    def __init__(self, refuse: SluiceError | None = None) -> None:
        self.given: list[float] = []
        self.refuse = refuse

    async def unary(self, method: object, request: object, timeout_s: float) -> RouteQueryResponse:
        self.given.append(timeout_s)
        if self.refuse is not None:
            raise self.refuse
        return RouteQueryResponse(decode=WorkerTarget(worker_id="w"), reservation_id="r")


def client_of(*replicas: Asked) -> RouterClient:
    client = RouterClient(*(f"127.0.0.1:{number + 1}" for number in range(len(replicas))), timeout_s=5.0)
    connections: Any = list(replicas)
    client._replicas._connections = connections
    return client


async def test_who_may_wait_in_line_keeps_the_place_for_as_long_as_was_asked() -> None:
    first, second = Asked(), Asked()
    await client_of(first, second).select_and_reserve("r", "m", [1], max_wait_s=60)
    assert first.given == [pytest.approx(62.5, abs=1)], "the wait, and a share of the rest"
    assert second.given == []


async def test_the_next_replica_has_what_is_left() -> None:
    first, second = Asked(error_of(ErrorKind.UNAVAILABLE, "Stopping.", retryable=True)), Asked()
    client = client_of(first, second)
    await client.select_and_reserve("r", "m", [1], max_wait_s=60)
    assert second.given == [pytest.approx(65, abs=1)]


async def test_a_call_without_a_wait_shares_its_time_equally() -> None:
    first, second = Asked(), Asked()
    await client_of(first, second).query("m", [1])
    assert first.given == [pytest.approx(2.5, abs=0.5)]


async def test_a_wait_longer_than_the_call_s_time_takes_no_more_than_that() -> None:
    first, second = Asked(), Asked()
    await client_of(first, second).route(RouteQueryRequest(max_wait_ms=60_000), timeout_s=4.0)
    assert first.given == [pytest.approx(4, abs=0.5)]
