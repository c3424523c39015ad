"""A server that was made a replica behind its name: a writer finds the server that took over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common.redis.scripts import Script, ScriptRunner
from services.common.redis.target import parse
from services.router.state.store.base import StoreUnavailable
from services.router.state.store.redis import RedisStore
from services.router.state.workers.worker import Role, Worker
from tests.support.servers.redis_name import RedisName
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.redis_topologies import ask

WORKER = Worker("a", "a:1", 1, "m", Role.AGGREGATED, 16, "sluice-xxh3-v1", 100, 1, b"")
COUNT = Script("return redis.call('INCR', KEYS[1])")


@asynccontextmanager
async def named(folder: Path) -> AsyncIterator[tuple[RedisName, RedisServer, RedisServer]]:
    servers = [RedisServer(folder) for _ in range(2)]
    try:
        for server in servers:
            server.start()
        async with RedisName() as name:
            name.port = servers[0].port
            yield name, servers[0], servers[1]
    finally:
        for server in servers:
            server.stop()


def fail_over(name: RedisName, old: RedisServer, new: RedisServer) -> None:
    """Connections to the old one stay: it answers, and takes nothing."""
    name.port = new.port
    ask(old.port, "REPLICAOF", "127.0.0.1", str(new.port))


async def test_the_router_s_store_leaves_a_server_that_was_made_a_replica(tmp_path: Path) -> None:
    async with named(tmp_path) as (name, old, new):
        store = RedisStore(name.url, timeout_s=10)
        await store.register(WORKER, "s", 60_000)
        fail_over(name, old, new)
        with pytest.raises(StoreUnavailable, match="read only"):
            await store.register(WORKER, "s", 60_000)
        await store.ping()
        await store.register(WORKER, "s", 60_000)
        assert [each.worker_id for each in (await store.load("m")).workers] == ["a"]
        await store.close()


async def test_shared_limits_leave_a_server_that_was_made_a_replica(tmp_path: Path) -> None:
    async with named(tmp_path) as (name, old, new):
        runner = ScriptRunner(parse(name.url), timeout_s=10)
        assert await runner.run(COUNT, ["n"], []) == 1
        fail_over(name, old, new)
        assert await runner.run(COUNT, ["n"], []) == 1  # a refusal changed nothing, so it was sent again to the new one
        assert await runner.run(COUNT, ["n"], []) == 2
        await runner.close()
