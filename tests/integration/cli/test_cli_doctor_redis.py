"""What the doctor finds in a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice.cli.doctor import redis as redis_checks
from sluice.cli.doctor.finding import FindingState
from tests.support.servers.redis_server import RedisServer


@contextmanager
def redis(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


async def states(url: str) -> dict[str, FindingState]:
    return {one.check: one.state for one in await redis_checks.examine(url)}


async def test_a_redis_that_is_fit_for_routers(tmp_path: Path) -> None:
    with redis(tmp_path) as server:
        found = await states(server.url)
    assert found["redis"] is FindingState.OK
    assert found["redis clock"] is FindingState.OK
    assert FindingState.FAIL not in found.values()


async def test_a_redis_that_forgets(tmp_path: Path) -> None:
    with redis(tmp_path, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server:
        assert (await states(server.url))["redis eviction"] is FindingState.WARN
