"""Random orders of composed policies, reserved in both stores: limits are never exceeded, and the order is kept."""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.router.scheduling.policies.offers import Demand, cache_aware
from services.router.state.kv_index.index import Overlap
from services.router.state.reservations.cost import CostModel, Limits
from services.router.state.reservations.table import AllBusy, ReservationParams
from services.router.state.store.base import Store
from services.router.state.store.memory import MemoryStore
from services.router.state.store.redis import RedisStore
from services.router.state.workers.worker import WorkerRank
from tests.support.servers.redis_server import RedisServer

SLOTS = [WorkerRank(name, rank) for name in "abc" for rank in range(2)]
NUMBERS = count()

slots = st.lists(st.sampled_from(SLOTS), unique=True, min_size=1)
steps = st.lists(
    st.tuples(slots, st.lists(st.integers(0, 300), min_size=6, max_size=6), st.integers(0, 3), st.booleans()),
    max_size=25,
)


@pytest.fixture(params=["memory", "redis"])
def kind(request: pytest.FixtureRequest) -> RedisServer | None:
    return request.getfixturevalue("shared_redis") if request.param == "redis" else None


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps, most=st.integers(1, 3))
async def test_random_orders_reserved_in_a_store_never_exceed_limits(
    kind: RedisServer | None, steps: list[tuple[list[WorkerRank], list[int], int, bool]], most: int, tmp_path: Path
) -> None:
    store: Store = MemoryStore(random=Random(1))
    if kind is not None:
        store = RedisStore(kind.url, prefix=f"{tmp_path.name}-{next(NUMBERS)}", timeout_s=10, random=Random(1))
    try:
        await _reserve_all(store, steps, most)
    finally:
        await store.close()


async def _reserve_all(store: Store, steps: list[tuple[list[WorkerRank], list[int], int, bool]], most: int) -> None:
    held: dict[str, WorkerRank] = {}
    limits = Limits(1e9, 1e9, most)
    for number, (some, order, overlap, free) in enumerate(steps):
        groups = {slot: order[at] for at, slot in enumerate(some)}
        made = [cache_aware(slot, Overlap(overlap), 0, Demand(4), CostModel()) for slot in some]
        offers = [offer._replace(limits=limits, group=groups[offer.slot]) for offer in made]
        booked = Counter(held.values())
        able = [slot for slot in some if booked[slot] < most]
        try:
            chosen = (await store.select("m", offers, ReservationParams(f"r{number}", 600_000))).slot
        except AllBusy:
            assert able == []
        else:
            assert groups[chosen] == min(groups[slot] for slot in able)
            assert booked[chosen] < most
            held[f"r{number}"] = chosen
        if free and held:
            gone = next(iter(held))
            assert await store.free("m", [gone]) == []
            del held[gone]
        loads = (await store.pulse("m")).loads
        assert {slot: load.requests for slot, load in loads.items()} == Counter(held.values())
    await store.free("m", [*held])
    assert (await store.pulse("m")).loads == {}
