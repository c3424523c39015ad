"""What gateways share about the workers they operate, in memory and in a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from services.common.base.errors import ErrorKind
from services.common.net.ports import free_port
from services.gateway.backends.workers import fleet_store, redis_fleet_store
from services.gateway.backends.workers.fleet_store import FleetStore, MemoryFleetStore
from services.gateway.backends.workers.redis_fleet_store import RedisFleetStore
from tests.support.oracles.errors import raises_error
from tests.support.servers.redis_server import RedisServer


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, shared_redis: RedisServer) -> AsyncIterator[FleetStore]:
    made: FleetStore = MemoryFleetStore()
    if request.param == "redis":
        made = RedisFleetStore(shared_redis.url, prefix=f"t{uuid4().hex}", timeout_s=20)
    yield made
    await made.close()


async def test_stored_values_are_those_put_and_not_removed(store: FleetStore) -> None:
    assert await store.all("adapters") == {}
    await store.put("adapters", "m\npoet", "/adapters/poet")
    await store.put("adapters", "m\npoet", "")
    await store.put("asleep", "worker-ü", "m\n127.0.0.1:1")
    assert await store.all("adapters") == {"m\npoet": ""}
    assert await store.all("asleep") == {"worker-ü": "m\n127.0.0.1:1"}
    assert await store.remove("adapters", "m\npoet")
    assert not await store.remove("adapters", "m\npoet")
    assert await store.all("adapters") == {}


async def test_value_too_many_is_refused_and_a_known_one_is_not(
    store: FleetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fleet_store, redis_fleet_store):
        monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    for name in ("a", "b", "a"):
        await store.put("adapters", name, "")
    with raises_error(kind=ErrorKind.FAILED_PRECONDITION):
        await store.put("adapters", "c", "")
    await store.put("asleep", "c", "")
    assert set(await store.all("adapters")) == {"a", "b"}


async def test_unreachable_redis_is_reported_as_unavailable() -> None:
    store = RedisFleetStore(f"redis://127.0.0.1:{free_port()}", timeout_s=1)
    try:
        with raises_error(kind=ErrorKind.UNAVAILABLE, code="store_unavailable"):
            await store.all("adapters")
    finally:
        await store.close()
