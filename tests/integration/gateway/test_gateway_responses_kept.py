"""Responses kept in memory and in a real Redis: one set of tests for both, and what happens when Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import TaskOwner
from services.gateway.apis.responses.conversations import Conversations
from services.gateway.apis.responses.redis_store import RedisStore
from services.gateway.apis.responses.store import PER_RESPONSE, MemoryStore, ResponseStore, StoredResponse, StoreLimits
from tests.support.oracles.errors import raises_error
from tests.support.servers.redis_server import RedisServer

ONE = StoredResponse(b'{"id":"resp_1"}', '[{"text":"Grüße 🚢"}]'.encode())
LIMITS = StoreLimits.of(10, 1 << 20)
Make = Callable[[int, int, float], ResponseStore]


@pytest.fixture(params=["memory", "redis"])
async def make(request: pytest.FixtureRequest, shared_redis: RedisServer) -> AsyncIterator[Make]:
    """Makes stores of one kind, each empty."""
    tasks = TaskOwner()
    stores: list[ResponseStore] = []

    def made(most: int, most_bytes: int, longest_s: float) -> ResponseStore:
        if request.param == "memory":
            store: ResponseStore = MemoryStore(StoreLimits.of(most, most_bytes), longest_s)
        else:
            prefix = f"t{uuid4().hex}"
            store = RedisStore(
                shared_redis.url, StoreLimits.of(most, most_bytes), longest_s, tasks, prefix, timeout_s=20
            )
        stores.append(store)
        return store

    yield made
    await tasks.close()
    for store in stores:
        await store.close()


async def settled(store: ResponseStore) -> None:
    """Waits until what was kept is where it belongs."""
    for _ in range(6000):
        if not isinstance(store, RedisStore) or not store._pending:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it is still on its way")


async def test_what_is_kept_is_found_by_its_owner_at_once_and_later(make: Make) -> None:
    store = make(10, 1 << 20, 60)
    store.put("a", "resp_1", ONE)
    assert await store.find("a", "resp_1") == ONE
    await settled(store)
    assert await store.find("a", "resp_1") == ONE
    assert await store.find("b", "resp_1") is None
    assert await store.find("a", "resp_2") is None
    assert not await store.delete("b", "resp_1")
    assert await store.delete("a", "resp_1")
    assert not await store.delete("a", "resp_1")
    assert await store.find("a", "resp_1") is None


async def test_the_oldest_of_too_many_are_forgotten(make: Make) -> None:
    store = make(3, 1 << 20, 60)
    for index in range(5):
        store.put("a", f"resp_{index}", ONE)
        await settled(store)
    found = [await store.find("a", f"resp_{index}") is not None for index in range(5)]
    assert found == [False, False, True, True, True]


async def test_too_many_bytes_push_out_the_oldest_and_nothing_is_larger_than_all(make: Make) -> None:
    store = make(100, 10_000, 60)
    for name, size in (("resp_1", 4_000), ("resp_2", 4_000), ("resp_3", 4_000), ("resp_4", 20_000)):
        store.put("a", name, StoredResponse(b"x" * size, b"[]"))
        await settled(store)
    found = [await store.find("a", f"resp_{index}") is not None for index in (1, 2, 3, 4)]
    assert found == [False, True, True, False]
    store.put("a", "resp_2", StoredResponse(b"y", b"[]"))
    await settled(store)
    assert await store.find("a", "resp_3") is not None, "one that is kept anew counts once"


async def test_what_is_too_old_is_forgotten(make: Make) -> None:
    store = make(10, 1 << 20, 0.05)
    store.put("a", "resp_1", ONE)
    await settled(store)
    for _ in range(3000):
        if await store.find("a", "resp_1") is None:
            break
        await asyncio.sleep(0.01)
    assert await store.find("a", "resp_1") is None


async def test_gateways_share_what_redis_keeps(shared_redis: RedisServer) -> None:
    tasks = TaskOwner()
    one, other = (RedisStore(shared_redis.url, LIMITS, 60, tasks, "shared", timeout_s=20) for _ in range(2))
    one.put("a", "resp_1", ONE)
    await settled(one)
    assert await other.find("a", "resp_1") == ONE
    assert await other.delete("a", "resp_1")
    assert await one.find("a", "resp_1") is None
    await tasks.close()
    await one.close()
    await other.close()


async def test_redis_that_is_away_is_a_typed_error_and_keeping_does_not_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = TaskOwner()
    server = RedisServer(tmp_path)
    store = RedisStore(server.url, LIMITS, 60, tasks)
    store.put("a", "resp_1", ONE)
    assert await store.find("a", "resp_1") == ONE
    await settled(store)
    assert "not stored" in caplog.text
    with pytest.raises(SluiceError) as caught:
        await store.find("a", "resp_1")
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    await tasks.close()
    await store.close()


async def test_a_url_that_is_none_is_refused_without_its_password() -> None:
    with pytest.raises(SluiceError) as caught:
        RedisStore("http://:secret@example.org", LIMITS, 1, TaskOwner())
    assert "secret" not in caught.value.message
    assert caught.value.param == "responses-redis-url"


async def test_a_value_is_replaced_only_if_it_is_the_expected_one(make: Make) -> None:
    store = make(10, 1 << 20, 60)
    two = StoredResponse(b"{}", b"[2]")
    assert not await store.swap("a", "conv_1", ONE, two)
    assert await store.swap("a", "conv_1", None, ONE)
    assert not await store.swap("a", "conv_1", None, two)
    assert not await store.swap("a", "conv_1", two, two)
    assert await store.swap("a", "conv_1", ONE, two)
    assert await store.find("a", "conv_1") == two
    assert await store.find("b", "conv_1") is None


async def test_a_value_that_exceeds_the_limits_by_itself_is_refused(make: Make) -> None:
    store = make(10, 2000, 60)
    with pytest.raises(SluiceError) as refused:
        await store.swap("a", "conv_1", None, StoredResponse(b"x" * 3000, b""))
    assert refused.value.code == "conversation_too_large"


async def test_turns_that_end_at_the_same_time_are_all_in_their_conversation(make: Make) -> None:
    store = make(10, 1 << 20, 60)
    gateways = [Conversations(store), Conversations(store)]
    made = await gateways[0].create("a", {}, [])
    for index in range(10):
        gateways[index % 2].append("a", made["id"], [{"id": f"msg_{index}"}, {"id": f"fc_{index}"}])
    for gateway in gateways:
        await gateway.find("a", made["id"])
    _, items = await gateways[0].find("a", made["id"])
    assert sorted(item["id"] for item in items) == sorted(
        f"{kind}_{index}" for kind in ("msg", "fc") for index in range(10)
    )


def of_size(size: int) -> StoredResponse:
    return StoredResponse(bytes(size - PER_RESPONSE), b"")


OPERATIONS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("abc"), st.integers(0, 5), st.integers(PER_RESPONSE, 4_000)),
    st.tuples(st.just("swap"), st.sampled_from("abc"), st.integers(0, 5), st.integers(PER_RESPONSE, 4_000)),
    st.tuples(st.just("delete"), st.sampled_from("abc"), st.integers(0, 5), st.just(0)),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(OPERATIONS, max_size=40))
async def test_both_stores_stay_within_the_limits_of_owners_and_of_all_and_give_everything_back(
    shared_redis: RedisServer, operations: list[tuple[str, str, int, int]]
) -> None:
    limits, tasks = StoreLimits(4, 8_000, 8, 14_000, 3_500), TaskOwner()
    memory = MemoryStore(limits, 60)
    redis = RedisStore(shared_redis.url, limits, 60, tasks, f"t{uuid4().hex}", timeout_s=20)
    try:
        for operation, owner, number, size in operations:
            for store in (memory, redis):
                name, stored = f"resp_{number}", of_size(max(size, PER_RESPONSE))
                if operation == "put":
                    store.put(owner, name, stored)
                    await settled(store)
                elif operation == "swap" and stored.size > limits.value_bytes:
                    with raises_error(kind=ErrorKind.TOO_LARGE):
                        await store.swap(owner, name, await store.find(owner, name), stored)
                elif operation == "swap":
                    assert await store.swap(owner, name, await store.find(owner, name), stored)
                else:
                    await store.delete(owner, name)
            for store in (memory, redis):
                found = {each: [await store.find(each, f"resp_{at}") for at in range(6)] for each in "abc"}
                sizes = {each: [one.size for one in kept if one is not None] for each, kept in found.items()}
                assert all(len(each) <= limits.owner_responses for each in sizes.values())
                assert all(sum(each) <= limits.owner_bytes for each in sizes.values())
                assert sum(map(len, sizes.values())) <= limits.responses
                total = sum(map(sum, sizes.values()))
                assert total <= limits.total_bytes
                for each, kept in sizes.items():
                    assert await store.used(each) == (sum(kept), total)
        for store in (memory, redis):
            for owner in "abc":
                for number in range(6):
                    await store.delete(owner, f"resp_{number}")
                assert (await store.used(owner))[0] == 0
            assert await store.used("a") == (0, 0)
    finally:
        await tasks.close()
        await redis.close()
