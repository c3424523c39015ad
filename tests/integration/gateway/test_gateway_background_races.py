"""Background responses that two gateways change at the same time, in memory and in a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from math import inf
from typing import Any, cast
from uuid import uuid4

import orjson
import pytest

from services.common.base.tasks import TaskOwner
from services.gateway.apis.responses.background import LEASE, BackgroundResponses, BackgroundRun
from services.gateway.apis.responses.redis_store import RedisStore
from services.gateway.apis.responses.store import MemoryStore, ResponseStore, StoredResponse, StoreLimits
from services.gateway.settings import GatewaySettings
from tests.support.fakes.clock import Clock
from tests.support.servers.redis_server import RedisServer
from tests.support.waiting import until

OWNER, ID = "tenant", "resp_1"
QUEUED = {"id": ID, "object": "response", "created_at": 1, "status": "queued", "background": True, "error": None}
RUNNING, COMPLETED = {**QUEUED, "status": "in_progress"}, {**QUEUED, "status": "completed", "output": ["text"]}
LEASE_S = 30.0


class Interleaved:
    """A store of one gateway, in which another one acts between a read and the write that follows it."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self.pace = store.pace
        self.parsed = store.parsed
        self.between: Callable[[], Awaitable[None]] | None = None

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        found = await self._store.find(owner, response_id)
        if (between := self.between) is not None:
            self.between = None
            await between()
        return found

    async def age_s(self, owner: str, response_id: str) -> float:
        """None is renewed by the store's clock, so that the gateways' own decides."""
        return inf

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Gateways:
    """Two gateways that share a store; `run` is a response of the first."""

    def __init__(self, stores: list[ResponseStore]) -> None:
        self.clock = Clock(100.0)
        self.between = Interleaved(stores[1])
        settings = GatewaySettings()
        self.one = BackgroundResponses(stores[0], settings, self.clock, LEASE_S)
        self.two = BackgroundResponses(cast("ResponseStore", self.between), settings, self.clock, LEASE_S)
        self.run = self.one.begin(OWNER, ID, b"[]")
        self.one.update(self.run, QUEUED)

    async def store(self, state: dict[str, Any]) -> None:
        """Changes the response at the first gateway, and waits until that is stored."""
        self.one.update(self.run, state)
        await until(lambda: self.run.wanted is None)

    async def seen(self) -> str:
        stored = await self.two.find(OWNER, ID)
        assert stored is not None
        state = orjson.loads(stored.response)
        assert LEASE not in state
        status: str = state["status"]
        return status


@pytest.fixture(params=["memory", "redis"])
async def gateways(request: pytest.FixtureRequest, shared_redis: RedisServer) -> AsyncIterator[Gateways]:
    tasks, limits = TaskOwner(), StoreLimits.of(10, 1 << 20)
    memory: ResponseStore = MemoryStore(limits, 3600)
    stores = [memory, memory]
    if request.param == "redis":
        prefix = f"t{uuid4().hex}"
        stores = [RedisStore(shared_redis.url, limits, 3600, tasks, prefix, timeout_s=20) for _ in range(2)]
    yield Gateways(stores)
    await tasks.close()
    for store in stores:
        await store.close()


async def test_change_after_a_cancel_elsewhere_leaves_it_cancelled_and_ends_the_run(gateways: Gateways) -> None:
    async def generate() -> None:
        await gateways.store(RUNNING)
        assert await gateways.two.cancel(OWNER, ID) is not None
        gateways.one.update(gateways.run, COMPLETED)
        await gateways.run.gone()

    await gateways.one.run(gateways.run, generate)
    assert await gateways.seen() == "cancelled"


async def test_cancel_that_reads_before_the_response_completes_leaves_the_result(gateways: Gateways) -> None:
    async def generate() -> None:
        await gateways.store(RUNNING)
        gateways.between.between = lambda: gateways.store(COMPLETED)
        stored = await gateways.two.cancel(OWNER, ID)
        assert stored is not None
        assert orjson.loads(stored.response) == COMPLETED

    await gateways.one.run(gateways.run, generate)
    assert await gateways.seen() == "completed"


async def test_lease_renewed_while_another_gateway_reads_it_as_expired_is_kept(gateways: Gateways) -> None:
    async def generate() -> None:
        await gateways.store(RUNNING)
        gateways.clock.now += LEASE_S + 1
        gateways.between.between = lambda: gateways.store(RUNNING)
        assert await gateways.seen() == "in_progress"
        assert await gateways.seen() == "in_progress"

    await gateways.one.run(gateways.run, generate)


async def test_age_of_a_response_is_the_time_since_it_was_stored(gateways: Gateways) -> None:
    async def generate() -> None:
        await gateways.store(RUNNING)
        store = gateways.one._store
        assert 0 <= await store.age_s(OWNER, ID) < 20
        assert await store.age_s(OWNER, "resp_unknown") == inf

    await gateways.one.run(gateways.run, generate)


async def test_response_deleted_elsewhere_is_not_stored_again(gateways: Gateways) -> None:
    run: BackgroundRun = gateways.run

    async def generate() -> None:
        await gateways.store(RUNNING)
        assert await gateways.between.delete(OWNER, ID)
        gateways.one.update(run, COMPLETED)
        await run.gone()

    await gateways.one.run(run, generate)
    assert await gateways.two.find(OWNER, ID) is None
