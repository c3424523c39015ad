"""Every user of Redis is back within 10 s of the election of a new master, whatever ended the old one."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import TaskOwner
from services.gateway.admission.keys import ApiKey
from services.gateway.admission.limits import LimitsUnavailable
from services.gateway.admission.redis_limiter import RedisLimiter
from services.gateway.apis.batches.redis_store import RedisBatchStore
from services.gateway.apis.batches.store import Limits
from services.gateway.apis.responses.redis_store import RedisStore as RedisResponses
from services.gateway.apis.responses.store import StoredResponse, StoreLimits
from services.gateway.backends.workers.redis_fleet_store import RedisFleetStore
from services.router.state.reservations.cost import Offer
from services.router.state.reservations.table import ReservationParams
from services.router.state.store.base import StoreUnavailable
from services.router.state.store.redis import RedisStore
from services.router.state.workers.worker import Role, Worker, WorkerRank
from tests.support.servers.moving_redis import TOPOLOGIES, MovingCluster, MovingRedis
from tests.support.waiting import until

MAX_BACK_S = 10.0
PACE_S = 0.05
MODEL = "m"
OFFERS = [Offer(WorkerRank("w", 0), 10, 10, 0, 10_000, 10_000)]
SHORT = {("cluster", "killed"), ("cluster", "frozen"), ("single", "frozen"), ("sentinel", "frozen")}

Use = Callable[[], Awaitable[object]]


def cases() -> list[object]:
    return [
        pytest.param(
            topology, fault, id=f"{topology}-{fault}", marks=() if (topology, fault) in SHORT else pytest.mark.slow
        )
        for topology, faults in (
            ("single", ("killed", "frozen", "planned")),
            ("sentinel", ("killed", "frozen", "planned")),
            ("cluster", ("killed", "frozen", "planned", "resharded", "renewed")),
        )
        for fault in faults
    ]


def near(place: MovingRedis, key: Callable[[str], str]) -> str:
    """Returns a name whose key is at the master that is to move."""
    if not isinstance(place, MovingCluster):
        return "n0"
    master = place.master()
    return next(name for number in itertools.count() if place.cluster.master_of(key(name := f"n{number}")) is master)


@asynccontextmanager
async def users(place: MovingRedis) -> AsyncIterator[dict[str, Use]]:
    """Every user of Redis, with keys at the master that is to move."""
    url, tasks = place.url, TaskOwner()
    tenant = near(place, lambda name: name)
    store = RedisStore(url, "sluice", timeout_s=1)
    await store.register(Worker("w", "w:1", 1, MODEL, Role.AGGREGATED, 16, "sluice-xxh3-v1", 100, 1, b""), "s", 600_000)
    limiter = RedisLimiter(url)
    responses = RedisResponses(url, StoreLimits.of(100, 1 << 20), 600, tasks)
    batches = RedisBatchStore(url, Limits(10, 1 << 20, 10, 1 << 20), 600)
    fleet = RedisFleetStore(url, prefix=near(place, lambda name: f"{name}:fleet:adapters"))
    numbers = itertools.count()

    async def route() -> None:
        request = f"r{next(numbers)}"
        await store.select(MODEL, OFFERS, ReservationParams(request, 60_000))
        await store.free(MODEL, [request])

    async def enter() -> None:
        request = f"r{next(numbers)}"
        key = ApiKey(tenant, "k", "", concurrency=100)
        await limiter.enter(key, request)
        await limiter.settle(key, request, 0)

    async def store_response() -> None:
        await responses.swap(tenant, "resp", await responses.find(tenant, "resp"), StoredResponse(b"1", b"[]"))

    async def list_files() -> None:
        await batches.files(tenant)

    async def keep_adapter() -> None:
        await fleet.put("adapters", "a", "1")

    try:
        yield {
            "router": route,
            "limits": enter,
            "responses": store_response,
            "batches": list_files,
            "fleet": keep_adapter,
        }
    finally:
        for user in (store, limiter, responses, batches, fleet):
            await user.close()
        await tasks.close()


class Steady:
    """Uses Redis again and again; only failures that the user's callers know are allowed."""

    def __init__(self, use: Use) -> None:
        self._use = use
        self.worked: list[float] = []
        self.failed = 0

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self._use()
                self.worked.append(began)
            except (StoreUnavailable, LimitsUnavailable, SluiceError) as error:
                if isinstance(error, SluiceError) and error.kind is not ErrorKind.UNAVAILABLE:
                    raise
                self.failed += 1
            await asyncio.sleep(PACE_S)

    def back_at(self, since: float) -> float | None:
        return next((at for at in self.worked if at >= since), None)


async def all_back(steady: Sequence[Steady], since: float) -> None:
    await until(lambda: all(each.back_at(since) is not None for each in steady), timeout_s=30)


@pytest.mark.parametrize(("topology", "fault"), cases())
async def test_users_of_redis_whose_master_moved_are_back_in_time(topology: str, fault: str, tmp_path: Path) -> None:
    async with TOPOLOGIES[topology](tmp_path, "{sluice:m}") as place, users(place) as uses:
        steady = {name: Steady(use) for name, use in uses.items()}
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(each.run()) for each in steady.values()]
            await all_back(list(steady.values()), time.monotonic())
            elected = await place.fault(fault)
            await all_back(list(steady.values()), elected)
            late = {name: each.back_at(elected) - elected for name, each in steady.items()}  # type: ignore[operator]
            print(topology, fault, {name: round(seconds, 2) for name, seconds in late.items()})
            assert {name for name, seconds in late.items() if seconds > MAX_BACK_S} == set()
            await place.heal()
            healed = time.monotonic()
            await all_back(list(steady.values()), healed)
            failed = [each.failed for each in steady.values()]
            await all_back(list(steady.values()), time.monotonic() + 1)
            assert [each.failed for each in steady.values()] == failed, "the old master's return disturbs no caller"
            for task in running:
                task.cancel()
