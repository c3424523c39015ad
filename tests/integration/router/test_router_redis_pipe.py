"""Scripts on connections that the client drives itself: replies stay in order, and a broken connection is replaced."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from services.common.redis.servers import RedisServers
from services.common.redis.target import parse
from services.router.state.store.base import StoreUnavailable
from services.router.state.store.redis_client import RedisClient
from tests.support.servers.redis_server import RedisServer
from tests.support.waiting import until


async def ids(redis: RedisServer) -> set[str]:
    """Returns the ids of the server's connections that have run a script."""
    async with Redis.from_url(redis.url) as client:
        listed: Any = await client.client_list()
    return {each["id"] for each in listed if each["cmd"].startswith("eval")}


async def session(client: RedisClient, name: str, value: str) -> str:
    """Stores a session and reads it again."""
    await client.run("set_session", "{pipe}", name, value, 60_000)
    return str((await client.run("session", "{pipe}", name)).decode())


async def test_replies_of_concurrent_calls_reach_their_callers(redis: RedisServer) -> None:
    client = RedisClient(RedisServers(parse(redis.url), 5.0), 5.0)
    names = [f"s{number}" for number in range(500)]
    assert await asyncio.gather(*(session(client, name, f"v-{name}" * 50) for name in names)) == [
        f"v-{name}" * 50 for name in names
    ]
    before = await ids(redis)
    assert 1 <= len(before) <= 2
    await session(client, "again", "v")
    assert await ids(redis) == before, "the same connections"
    await client.close()


async def test_connection_that_is_closed_while_idle_is_replaced(redis: RedisServer) -> None:
    client = RedisClient(RedisServers(parse(redis.url), 5.0), 5.0, lanes=1)
    await session(client, "a", "1")
    (first,) = await ids(redis)
    async with Redis.from_url(redis.url) as other:
        await other.client_kill_filter(_id=first)

    async def works() -> bool:
        try:
            return await session(client, "a", "2") == "2"
        except StoreUnavailable:
            return False  # sent before the end of the connection was noticed

    await until(works)
    (second,) = await ids(redis)
    assert second != first
    await client.close()


async def test_late_replies_are_not_taken_for_those_of_the_next_call(redis: RedisServer) -> None:
    client = RedisClient(RedisServers(parse(redis.url), 0.5), 0.5, lanes=1)
    await session(client, "a", "1")
    await session(client, "b", "2")
    redis.freeze()
    try:
        with pytest.raises(StoreUnavailable, match="TimeoutError"):
            await client.run("session", "{pipe}", "a")
    finally:
        redis.thaw()
    assert (await client.run("session", "{pipe}", "b")).decode() == "2"
    await client.close()


async def test_error_of_a_script_leaves_its_connection_in_use(redis: RedisServer) -> None:
    client = RedisClient(RedisServers(parse(redis.url), 5.0), 5.0, lanes=1)
    await session(client, "a", "1")
    before = await ids(redis)
    with pytest.raises(StoreUnavailable):
        await client.run("set_session", "{pipe}", "a", "1", "never")
    assert await session(client, "a", "3") == "3"
    assert await ids(redis) == before
    await client.close()
