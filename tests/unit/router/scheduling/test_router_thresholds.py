"""Busy thresholds: what is too much is refused or waits, never more than that, and never when they are off."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.router.router import RouterConfig
from services.router.scheduling.queries import RouteResult
from services.router.scheduling.selection import CLOSED, Thresholds
from services.router.state.reservations.cost import Limits, Load
from services.router.state.sync.load_reconciler import Reported
from services.router.state.workers.worker import WorkerRank
from tests.support.oracles.errors import raises_error
from tests.support.servers.routing import BLOCK, Cluster, prompt, worker
from tests.support.waiting import until

A = WorkerRank("a", 0)


def read_report(report: bytes) -> Sequence[Reported]:
    return [Reported(used_blocks=blocks) for blocks in report]


def test_limits_come_from_the_card() -> None:
    assert not Thresholds()
    assert Thresholds(kv_share=0.2).limits(worker("a", blocks=64), 0) == Limits(math.inf, 12.8, math.inf)
    assert Thresholds(0.2, 80, 3).limits(worker("a", blocks=100), 19) == Limits(10, 20, 3)
    assert Thresholds(0.2, 80, 3).limits(worker("a", blocks=100), 20) == CLOSED
    assert Thresholds(prefill_tokens=32).limits(worker("a", size=0, blocks=0), 0) == Limits(2, math.inf, math.inf)


async def everybody(
    cluster: Cluster, count: int, first: int = 0, **more: object
) -> tuple[list[RouteResult], list[SluiceError]]:
    """So many requests of five blocks each, no block in two of them."""
    prompts = ("".join(chr(200 + 5 * n + at) for at in range(5)) for n in range(first, first + count))
    asked = (cluster.ask(prompt(text), request_id=f"r{n}", **more) for n, text in enumerate(prompts))
    answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
    refused = [answer for answer in answers if isinstance(answer, SluiceError)]
    return [answer for answer in answers if isinstance(answer, RouteResult)], refused


async def test_overload_refuses_the_surplus() -> None:
    async with Cluster(RouterConfig(thresholds=Thresholds(kv_share=0.2))) as cluster:
        await cluster.add(worker("a", blocks=64))
        served, refused = await everybody(cluster, 20)
        assert (len(served), len(refused)) == (3, 17)  # the third starts at 10 blocks, below 12.8
        assert {(error.kind, error.code) for error in refused} == {(ErrorKind.OVERLOADED, "overloaded")}
        assert all(error.retry_after_ms > 0 for error in refused)
        await cluster.router.lifecycle.free([route.reservation_id for route in served])
        assert (await cluster.loads())["a"] == Load()
        assert len((await everybody(cluster, 20, first=20))[0]) == 3


async def test_without_thresholds_no_request_is_refused() -> None:
    async with Cluster() as cluster:
        await cluster.add(worker("a", blocks=64))
        served, refused = await everybody(cluster, 200)
        assert (len(served), refused) == (200, [])


async def test_only_asking_is_refused_too() -> None:
    async with Cluster(RouterConfig(thresholds=Thresholds(requests=1))) as cluster:
        await cluster.add(worker("a"))
        await cluster.ask(prompt("A"), request_id="r")
        with raises_error(kind=ErrorKind.OVERLOADED):
            await cluster.ask(prompt("A"))


async def test_a_repeated_request_is_answered_however_busy_it_is() -> None:
    async with Cluster(RouterConfig(thresholds=Thresholds(requests=1))) as cluster:
        await cluster.add(worker("a"))
        first = await cluster.ask(prompt("A"), request_id="r")
        again = await cluster.ask(prompt("A"), request_id="r")
        assert (again.reservation_id, again.expires_unix_ms) == (first.reservation_id, first.expires_unix_ms)


@pytest.mark.parametrize("policy", ["kv", "round_robin", "random", "least_loaded", "power_of_two"])
async def test_whatever_the_policy_all_room_is_used_and_no_more(policy: str) -> None:
    async with Cluster(RouterConfig(thresholds=Thresholds(requests=3))) as cluster:
        await cluster.add(*(worker(f"w{n}") for n in range(8)))
        served, refused = await everybody(cluster, 40, policy=policy)
        assert (len(served), len(refused)) == (24, 16)
        assert {load.requests for load in (await cluster.loads()).values()} == {3}


async def test_prefill_load_counts_until_it_is_computed() -> None:
    async with Cluster(RouterConfig(thresholds=Thresholds(prefill_tokens=5 * BLOCK))) as cluster:
        await cluster.add(worker("a"))
        first = await cluster.ask(prompt("ABCDE"), request_id="r1")
        with pytest.raises(SluiceError):
            await cluster.ask(prompt("VWXYZ"), request_id="r2")
        await cluster.router.lifecycle.mark_prefill_complete([first.reservation_id])
        assert (await cluster.ask(prompt("VWXYZ"), request_id="r2")).worker.worker_id == "a"


async def test_blocks_in_use_as_reported_make_a_worker_busy_too() -> None:
    async with Cluster(RouterConfig(thresholds=Thresholds(kv_share=0.5)), read_report=read_report) as cluster:
        await cluster.add(worker("a", blocks=100), worker("b", blocks=100))
        await cluster.report("a", bytes([50]))
        assert {(await cluster.ask(prompt("A"))).worker.worker_id for _ in range(20)} == {"b"}
        await cluster.report("b", bytes([60]))
        with pytest.raises(SluiceError):
            await cluster.ask(prompt("A"))
        await cluster.report("a", bytes([49]))
        assert (await cluster.ask(prompt("A"))).worker.worker_id == "a"


async def test_waiting_requests_are_served_as_others_end_best_priority_first() -> None:
    async with Cluster(RouterConfig(thresholds=Thresholds(requests=1))) as cluster:
        await cluster.add(worker("a"))
        running = await cluster.ask(prompt("A"), request_id="r0")
        order: list[int] = []

        async def wait(priority: int) -> None:
            route = await cluster.ask(prompt("A"), request_id=f"p{priority}", priority=priority, max_wait_ms=60_000)
            order.append(priority)
            assert route.waited_ms >= 0
            await cluster.router.lifecycle.free([route.reservation_id])

        waiting = [asyncio.create_task(wait(priority)) for priority in (3, 1, 2)]
        await until(lambda: cluster.router.queues.length("m") == 3)
        await cluster.router.lifecycle.free([running.reservation_id])
        await asyncio.wait_for(asyncio.gather(*waiting), 60)
        assert order == [1, 2, 3]
        assert (await cluster.loads())["a"] == Load()


async def test_capacity_freed_by_another_replica_is_noticed() -> None:
    async with Cluster(RouterConfig(thresholds=Thresholds(requests=1), wait_ms=60_000)) as cluster:
        await cluster.add(worker("a"))
        await cluster.ask(prompt("A"), request_id="r0")
        waiting = asyncio.create_task(cluster.ask(prompt("A"), request_id="r1"))
        await until(lambda: cluster.router.queues.length("m") == 1)
        assert await cluster.router._replica.store.free("m", ["r0"]) == []
        assert (await asyncio.wait_for(waiting, 60)).waited_ms > 0


async def test_a_caller_that_leaves_the_line_leaves_nothing_behind() -> None:
    async with Cluster(RouterConfig(thresholds=Thresholds(requests=1))) as cluster:
        await cluster.add(worker("a"))
        running = await cluster.ask(prompt("A"), request_id="r0")
        waiting = asyncio.create_task(cluster.ask(prompt("A"), request_id="r1", max_wait_ms=60_000))
        await until(lambda: cluster.router.queues.length("m") == 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        await cluster.router.lifecycle.free([running.reservation_id])
        assert (await cluster.loads())["a"] == Load()
        assert cluster.router.queues.length("m") == 0
