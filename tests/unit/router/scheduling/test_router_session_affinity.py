"""Sessions stay where they were while that makes sense."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.common.base.errors import ErrorKind
from services.router.router import RouterConfig
from services.router.scheduling.selection import Thresholds
from services.router.state.store.base import StoreUnavailable
from services.router.state.store.memory import MemoryStore
from services.router.state.store.session_affinity import LocalSessionAffinity
from services.router.state.workers.worker import WorkerRank
from tests.support.oracles.errors import raises_error
from tests.support.servers.routing import Cluster, prompt, worker

A, B = WorkerRank("a", 0), WorkerRank("b", 0)


def test_pins_expire_and_the_ones_silent_longest_make_room() -> None:
    now = 0
    pins = LocalSessionAffinity(lambda: now, most=2)
    pins.put("s1", A, 100)
    pins.put("s2", A, 100)
    pins.put("s1", B, 100)
    pins.put("s3", A, 50)
    assert (pins.get("s1"), pins.get("s2"), pins.get("s3")) == (B, None, A)
    now = 50
    assert (pins.get("s1"), pins.get("s3"), len(pins)) == (B, None, 1)
    now = 100
    assert (pins.get("s1"), len(pins)) == (None, 0)


class Leaky(MemoryStore):
    """A store that can go away, as far as sessions are concerned, and is shared by replicas."""

    embedded = False
    away = False

    async def session(self, model: str, session_id: str) -> WorkerRank | None:
        if self.away:
            raise StoreUnavailable("test")
        return await super().session(model, session_id)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(RouterConfig(thresholds=Thresholds(requests=2))) as made:
        await made.add(worker("a"), worker("b"))
        yield made


async def test_a_session_stays_although_another_worker_is_cheaper(cluster: Cluster) -> None:
    first = await cluster.ask(prompt("AB"), request_id="r1", session_id="s")
    assert not first.session_hit
    again = await cluster.ask(prompt("XY"), request_id="r2", session_id="s")
    assert (again.worker, again.session_hit) == (first.worker, True)
    stranger = await cluster.ask(prompt("XY"), request_id="r3")
    assert (stranger.worker == first.worker, stranger.session_hit) == (False, False)


async def test_a_busy_worker_loses_the_session_to_another(cluster: Cluster) -> None:
    first = await cluster.ask(prompt("A"), request_id="r1", session_id="s")
    await cluster.ask(prompt("A"), request_id="r2", session_id="s")
    moved = await cluster.ask(prompt("A"), request_id="r3", session_id="s")
    assert (moved.worker == first.worker, moved.session_hit) == (False, False)
    await cluster.router.lifecycle.free([first.reservation_id])
    after = await cluster.ask(prompt("A"), request_id="r4", session_id="s")
    assert (after.worker, after.session_hit) == (moved.worker, True)


async def test_a_session_follows_only_candidates_that_are_alive(cluster: Cluster) -> None:
    first = await cluster.ask(prompt("A"), session_id="s")
    name = first.worker.worker_id
    (other,) = {"a", "b"} - {name}
    elsewhere = await cluster.ask(prompt("A"), session_id="s", candidates=frozenset({other}))
    assert (elsewhere.worker.worker_id, elsewhere.session_hit) == (other, False)
    await cluster.lose(cluster.attachments["m", other])
    survivor = await cluster.ask(prompt("A"), session_id="s")
    assert (survivor.worker.worker_id, survivor.session_hit) == (name, False)


async def test_sessions_of_models_are_apart(cluster: Cluster) -> None:
    await cluster.add(worker("of-other", model="other"))
    await cluster.ask(prompt("A"), session_id="s")
    assert not (await cluster.ask(prompt("A"), model="other", session_id="s")).session_hit


async def test_a_session_is_forgotten_after_its_time(cluster: Cluster) -> None:
    await cluster.ask(prompt("A"), session_id="s", session_ttl_ms=1)
    for _ in range(1000):
        if not (await cluster.ask(prompt("A"), session_id="s", session_ttl_ms=1)).session_hit:
            return
    raise AssertionError("a session of 1 ms outlived a thousand requests")


async def test_a_session_id_has_a_bounded_length(cluster: Cluster) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="session_id"):
        await cluster.ask(prompt("A"), session_id="s" * 513)


async def test_while_the_store_is_away_this_replica_remembers_itself() -> None:
    store = Leaky()
    async with Cluster(store=store) as cluster:
        await cluster.add(worker("a"), worker("b"))
        first = await cluster.ask(prompt("AB"), session_id="s")
        store.away = True
        again = await cluster.ask(prompt("XY"), session_id="s")
        assert (again.worker, again.session_hit) == (first.worker, True)
