"""Random histories of three router replicas on a real Redis: in the end all hold what the workers hold, and no more."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from services.router.state.kv_index.events import CacheOperation, Tier
from services.router.state.store.redis import RedisStore
from tests.support.oracles.replication import MODEL, Content, Engine, Replica, stored_content
from tests.support.servers.redis_server import RedisServer

EXAMPLES = int(os.environ.get("SLUICE_TEST_EXAMPLES", "1000"))
REPLICAS = 3
SETTLED_S = 90

Test: TypeAlias = Callable[..., None]
Step: TypeAlias = tuple[str, int, int, int, list[int]]

_hashes = st.lists(st.integers(1, 60), max_size=6)
_number = st.integers(0, 1_000)
_deliveries = st.sampled_from(["in order"] * 6 + ["lost", "twice", "late"])
_caches = st.tuples(_deliveries, _number, st.sampled_from([0, 0, 0, 1, 1, 2]), st.sampled_from(list(range(3))), _hashes)
_no_hashes: st.SearchStrategy[list[int]] = st.just([])
_others = st.tuples(
    st.sampled_from(["restart", "move", "gone", "router", "outage", "return", "return", "late comes", "beat", "pause"]),
    _number,
    _number,
    st.just(0),
    _no_hashes,
)
histories = st.lists(st.one_of(_caches, _caches, _others), min_size=5, max_size=60)


@dataclass
class World:
    """The replicas, the workers and their Redis."""

    redis: RedisServer
    replicas: list[Replica] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    away: bool = False

    async def start(self) -> None:
        self.replicas = [Replica(self.redis) for _ in range(REPLICAS)]
        for replica in self.replicas:
            replica.start()
        self.engines = [Engine("a", 1), Engine("b", 2), Engine("c", 1)]
        for engine, replica in zip(self.engines, self.replicas, strict=True):
            await engine.attach(replica)

    async def do(self, step: Step) -> None:
        name, number, more, tier, hashes = step
        engine, replica = self.engines[number % len(self.engines)], self.replicas[more % REPLICAS]
        match name:
            case "in order" | "lost" | "twice" | "late":
                await self._cache(name, engine, number % engine.ranks, CacheOperation(more), Tier(tier), hashes)
            case "late comes":
                while engine.late:
                    await engine.say(engine.late.pop(number % len(engine.late)))
            case "restart":
                await engine.restart(replica)
            case "move":
                await engine.attach(replica)
            case "gone":
                engine.detach()
            case "router":
                await self._restart(self.replicas[number % REPLICAS])
            case "outage" if not self.away:
                self.away = True
                self.redis.stop()
            case "return" if self.away:
                self.away = False
                await asyncio.to_thread(self.redis.start)
            case "beat":
                await engine.beat()
            case "pause":
                await asyncio.sleep(number / 10_000)

    async def _cache(
        self, delivery: str, engine: Engine, rank: int, kind: CacheOperation, tier: Tier, hashes: list[int]
    ) -> None:
        batch = engine.happens(rank, kind, tier, [] if kind is CacheOperation.CLEARED else hashes)
        if delivery == "late":
            engine.late.append(batch)
        elif delivery != "lost":
            await engine.say(*[batch] * (2 if delivery == "twice" else 1))

    async def _restart(self, replica: Replica) -> None:
        mine = [engine for engine in self.engines if engine.replica is replica]
        await replica.stop()
        replica.start()
        for engine in mine:
            await engine.attach(self.replicas[(self.replicas.index(replica) + 1) % REPLICAS])

    async def settle(self) -> None:
        """Redis is there, every worker is attached and says something new."""
        if self.away:
            await asyncio.to_thread(self.redis.start)
        for engine in self.engines:
            if engine.attachment is None:
                await engine.attach(self.replicas[0])
            await engine.settle()

    async def disagreement(self, store: RedisStore) -> str:
        """Who does not hold what the workers hold; empty when all do."""
        for engine in self.engines:
            await engine.beat()
        expected: Content = {}
        for engine in self.engines:
            expected |= engine.content
        if (found := await stored_content(store)) != expected:
            return f"Redis holds {found} and not {expected}"
        for number, replica in enumerate(self.replicas):
            if replica.content != expected:
                return f"replica {number} holds {replica.content} and not {expected}"
        return ""

    async def stop(self) -> None:
        for replica in self.replicas:
            await replica.stop()


def expected_keys(content: Content) -> set[str]:
    """All that Redis should hold when nothing is booked."""
    tag = f"{{sluice:{MODEL}}}"
    keys = {"{sluice}:models", *(f"{tag}:{name}" for name in ("workers", "changes", "changed", "generation"))}
    for slot, (epoch, _, tiers) in content.items():
        keys |= {f"{tag}:worker:{slot.worker_id}", f"{{sluice}}:claim:{slot.worker_id}"}
        keys |= {f"{tag}:blocks:{slot.worker_id}:{epoch:020d}:{slot.rank}:{tier}" for tier in Tier if tiers[tier]}
    return keys


async def play(shared_redis: RedisServer, history: list[Step]) -> None:
    world = World(shared_redis)
    store = RedisStore(shared_redis.url, timeout_s=10, random=Random(1))
    async with Redis(port=shared_redis.port) as raw:
        await raw.flushall()
        await world.start()
        try:
            for step in history:
                await world.do(step)
            await world.settle()
            deadline = asyncio.get_running_loop().time() + SETTLED_S
            while problem := await world.disagreement(store):
                assert asyncio.get_running_loop().time() < deadline, problem
                await asyncio.sleep(0.02)
            content = world.replicas[0].content
            distinct = sum(len({block for _, _, tiers in content.values() for block in tiers[tier]}) for tier in Tier)
            assert [replica.distinct_blocks for replica in world.replicas] == [distinct] * REPLICAS
            assert {key.decode() for key in cast(list[bytes], await raw.keys())} == expected_keys(content)
            assert [death for replica in world.replicas for death in replica.deaths] == []
        finally:
            await world.stop()
            await store.close()


def _given(examples: int, derandomize: bool) -> Callable[[Test], Test]:
    chosen = settings(
        max_examples=examples,
        deadline=None,
        derandomize=derandomize,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )
    return lambda test: chosen(given(histories)(test))


@_given(100, derandomize=True)
def test_whatever_happens_the_replicas_and_redis_agree_with_the_workers(
    shared_redis: RedisServer, history: list[Step]
) -> None:
    asyncio.run(asyncio.wait_for(play(shared_redis, history), 180))


@pytest.mark.slow
@_given(EXAMPLES, derandomize=False)
def test_whatever_happens_they_agree_in_many_more_histories(shared_redis: RedisServer, history: list[Step]) -> None:
    asyncio.run(asyncio.wait_for(play(shared_redis, history), 180))
