"""Absurd numbers and names never get into the book."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.base.errors import ErrorKind
from services.router.scheduling.queries import MAX_MS, MAX_NAME, MAX_TOKENS, Prompt, Query
from services.router.state.reservations.cost import Load
from services.router.state.workers.worker import WorkerRank
from tests.support.oracles.errors import raises_error
from tests.support.servers.routing import COST, Cluster, prompt, worker

ABSURD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": Prompt(prompt_tokens=MAX_TOKENS + 1)}, "prompt.prompt_tokens"),
    ({"prompt": Prompt(prompt_tokens=2**32 - 1)}, "prompt.prompt_tokens"),
    ({"expected_output_tokens": 2**32 - 1}, "expected_output_tokens"),
    ({"ttl_ms": MAX_MS + 1}, "ttl_ms"),
    ({"session_ttl_ms": MAX_MS + 1}, "session_ttl_ms"),
    ({"max_wait_ms": MAX_MS + 1}, "max_wait_ms"),
    ({"request_id": "r" * (MAX_NAME + 1)}, "request_id"),
    ({"session_id": "s" * (MAX_NAME + 1)}, "session_id"),
    ({"owner": "o" * (MAX_NAME + 1)}, "owner"),
]


@pytest.mark.parametrize(("fields", "param"), ABSURD)
async def test_absurd_queries_are_refused(fields: dict[str, Any], param: str) -> None:
    query = Query(**{"model": "m", "prompt": prompt("A"), "cost": COST, "request_id": "r", **fields})
    async with Cluster() as cluster:
        await cluster.add(worker("a"))
        for call in (cluster.router.query(query), cluster.router.add(WorkerRank("a", 0), query)):
            with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=param):
                await call
        assert await cluster.loads() == {"a": Load()}


async def test_the_largest_that_are_allowed_are_booked_and_given_back() -> None:
    largest = Query(
        "m",
        Prompt(prompt_tokens=MAX_TOKENS),
        COST,
        "r" * MAX_NAME,
        expected_output_tokens=MAX_TOKENS,
        ttl_ms=MAX_MS,
        owner="o" * MAX_NAME,
    )
    async with Cluster() as cluster:
        await cluster.add(worker("a"))
        route = await cluster.router.query(largest)
        assert (await cluster.loads())["a"].requests == 1
        await cluster.router.lifecycle.free([route.reservation_id])
        assert await cluster.loads() == {"a": Load()}


async def test_absurd_progress_books_nothing() -> None:
    async with Cluster() as cluster:
        await cluster.add(worker("a"))
        route = await cluster.ask(prompt("A"), request_id="r")
        before = await cluster.loads()
        with raises_error(kind=ErrorKind.INVALID_ARGUMENT):
            await cluster.router.lifecycle.progress({route.reservation_id: 2**32 - 1})
        assert await cluster.loads() == before
