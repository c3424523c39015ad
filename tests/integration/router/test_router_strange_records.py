"""What a newer router or a broken hand left in Redis: a router goes on with the rest, and says what it left out."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from services.common.base.packing import pack_u64
from services.router.state.kv_index.events import BlockOp, CacheOperation, Tier, encode_ops
from services.router.state.store import redis as redis_store
from services.router.state.store.base import StoredModel
from services.router.state.store.redis import RedisStore
from services.router.state.sync import synchronizer as keeper
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.redis_topologies import ask
from tests.support.servers.routing import Cluster, worker
from tests.support.waiting import until

EPOCH = "1".zfill(20)
STORED = encode_ops([BlockOp(CacheOperation.STORED, Tier.DEVICE, pack_u64([7, 8]))])
NEWER_TIER = bytes([CacheOperation.STORED, 9]) + STORED[2:]
BLOCKS = ("r", "0", "s", "1", "o")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path_factory.mktemp("redis"))
    made.start()
    yield made
    made.stop()


class Redis:
    """A store's Redis, and a hand that writes what routers of this version do not."""

    def __init__(self, server: RedisServer, prefix: str) -> None:
        self._port = server.port
        self._base = f"{{{prefix}:m}}"
        self.url, self.prefix = server.url, prefix

    def keep(self, worker_id: str, card: str) -> None:
        """Changes what is kept of a worker."""
        ask(self._port, "HSET", f"{self._base}:worker:{worker_id}", "card", card)

    def tell(self, *fields: str | bytes) -> None:
        """Appends to the change feed."""
        number = ask(self._port, "INCR", f"{self._base}:changed")
        ask(self._port, "XADD", f"{self._base}:changes", "*", "n", number, *fields)  # type: ignore[arg-type]


@pytest.fixture
def redis(server: RedisServer, tmp_path: Path) -> Redis:
    redis_store._log_worker_skipped.cache_clear()
    redis_store._log_change_skipped.cache_clear()
    return Redis(server, tmp_path.name)


@asynccontextmanager
async def routing(redis: Redis) -> AsyncIterator[Cluster]:
    """A router of which no task dies."""
    deaths: list[object] = []
    store = RedisStore(redis.url, redis.prefix, timeout_s=10)
    async with Cluster(store=store, on_death=lambda name, error: deaths.append((name, error))) as cluster:
        yield cluster
    assert deaths == []


def known(cluster: Cluster) -> list[str]:
    return [each.worker_id for each in cluster.router.registry.workers("m")]


def left_out(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "skipping" in each.getMessage()]


def card(worker_id: str, **fields: object) -> str:
    return json.dumps(json.loads(worker(worker_id).to_json()) | fields)


@pytest.mark.parametrize("broken", [card("x", role=99), "{", "[]", "{}", '{"role": 1, "document": 5}'])
async def test_a_router_starts_beside_a_worker_it_cannot_read(
    redis: Redis, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = RedisStore(redis.url, redis.prefix, timeout_s=10)
    for worker_id in ("a", "x"):
        await store.register(worker(worker_id), "s", 10**6)
    redis.keep("x", broken)
    async with routing(redis) as cluster:
        assert known(cluster) == ["a"]
    assert [each.worker_id for each in (await store.load("m")).workers] == ["a"]
    assert len(left_out(caplog)) == 1, "though read twice"
    await store.close()


async def test_what_a_newer_router_adds_to_a_worker_is_not_read(redis: Redis) -> None:
    store = RedisStore(redis.url, redis.prefix, timeout_s=10)
    await store.register(worker("a"), "s", 10**6)
    redis.keep("a", card("a", zone="north", draining=True))
    assert (await store.load("m")).workers == [worker("a")]
    await store.close()


@pytest.mark.parametrize(
    "change",
    [
        ("k", "resized", "w", "a", "e", EPOCH),
        ("k", "resized", "w", "a", "e", EPOCH, "r", "0", "s", "1"),
        ("k", "blocks", "w", "a", "e", EPOCH, *BLOCKS, NEWER_TIER),
        ("k", "blocks", "w", "a", "e", EPOCH, *BLOCKS, STORED + b"\0"),
        ("k", "blocks", "w", "a", "e", EPOCH, *BLOCKS, STORED[:-1]),
        ("k", "up", "w", "x", "e", EPOCH, "card", card("x", role=99)),
        ("k", "down", "w", "a", "e", "soon"),
        ("w", "a", "e", EPOCH),
    ],
    ids=["kind", "kind-of-blocks", "tier", "cut-header", "cut-hashes", "role", "epoch", "no-kind"],
)
async def test_a_router_goes_on_after_a_change_it_cannot_read(
    redis: Redis, change: tuple[str | bytes, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with routing(redis) as cluster:
        await cluster.add(worker("a"))
        for _ in range(3):
            redis.tell(*change)
        redis.tell("k", "up", "w", "b", "e", EPOCH, "card", worker("b").to_json())
        await until(lambda: known(cluster) == ["a", "b"])
        await cluster.cache("m", cluster.router.registry.workers("m")[0].slots[0], pack_u64([1]))
    assert len(left_out(caplog)) == 1, "though it came three times"
    assert [each for each in caplog.records if each.exc_info] == []


async def test_a_model_whose_reading_fails_is_read_again_after_a_while(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "REREAD_AFTER_S", 0.2)
    load = RedisStore.load
    failed_at: list[float] = []

    async def broken(self: RedisStore, model: str) -> StoredModel:
        if len(failed_at) < 3:
            failed_at.append(asyncio.get_running_loop().time())
            raise KeyError("poison")
        return await load(self, model)

    store = RedisStore(redis.url, redis.prefix, timeout_s=10)
    await store.register(worker("a"), "s", 10**6)
    await store.close()
    monkeypatch.setattr(RedisStore, "load", broken)
    async with routing(redis) as cluster:
        assert known(cluster) == ["a"]
    assert min(after - before for before, after in pairwise(failed_at)) > 0.1
    assert sum("poison" in (each.exc_text or "") for each in caplog.records) == 3


async def test_a_report_that_cannot_be_read_is_no_report(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    from services.router.rpc.workers import read_report, worker_info

    garbled = b"\xff\xff" + redis.prefix.encode()
    assert read_report(garbled) == []
    assert worker_info(worker("a"), garbled).load.running_requests == 0
    assert sum("ignoring a stored worker report" in each.getMessage() for each in caplog.records) == 1
