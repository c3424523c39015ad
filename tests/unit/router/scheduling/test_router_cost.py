"""The cost function, selection and preselection."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.base.packing import pack_u64
from services.router.router import Router
from services.router.scheduling.policies.offers import Demand, cache_aware, load_only
from services.router.scheduling.preselect import LoadSnapshot, preselect
from services.router.scheduling.queries import Prompt, Query
from services.router.state.kv_index.events import BlockOp, CacheOperation, EventBatch, Tier
from services.router.state.kv_index.index import NO_OVERLAP, Overlap
from services.router.state.reservations.cost import CostModel, Load, choose, cost, softmax
from services.router.state.store.memory import MemoryStore
from services.router.state.workers.worker import Role, Worker, WorkerRank


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1.0, [0.50648, 0.307196, 0.186324]), (0.1, [0.993262, 0.006693, 0.000045])],
)
def test_softmax_normalises_costs_by_their_range(temperature: float, expected: list[float]) -> None:
    assert softmax([1, 2, 3], temperature) == pytest.approx(expected, abs=1e-6)
    assert softmax([10, 20, 30], temperature) == pytest.approx(expected, abs=1e-6)


def test_softmax_of_equal_costs_is_uniform() -> None:
    assert softmax([7, 7, 7, 7], 0.3) == [0.25] * 4


def test_cost_weighs_prefill_and_is_never_negative_for_it() -> None:
    assert cost(3, 10 - 4, 5, 1) == 14
    assert cost(3, 10 - 4, 5, 0.5) == 9.5
    assert cost(0, -2, 5, 1) == 5


def test_credits_per_tier() -> None:
    assert CostModel().credit(Overlap(4, 4, 4)) == 8


def test_cheapest_wins_then_the_emptiest() -> None:
    assert choose([2, 1, 3], [0, 9, 0], 0, Random(1)) == 1
    assert choose([1, 1, 3], [9, 8, 0], 0, Random(1)) == 1


def test_full_ties_are_broken_at_random() -> None:
    random = Random(1)
    seen = Counter(choose([1, 1, 5], [3, 3, 0], 0, random) for _ in range(1000))
    assert set(seen) == {0, 1}
    assert min(seen.values()) > 400


def test_temperature_samples_by_the_softmax() -> None:
    random = Random(1)
    seen = Counter(choose([1, 2, 3], [0, 0, 0], 1.0, random) for _ in range(10_000))
    assert [seen[at] / 10_000 for at in range(3)] == pytest.approx([0.506, 0.307, 0.186], abs=0.02)


@pytest.mark.parametrize(
    ("overlap", "work"),
    [
        (NO_OVERLAP, 6.0),
        (Overlap(2), 6.0),  # holds only a part of the first item
        (Overlap(3), 2.0),
        (Overlap(1, 1, 1), 2.0),
        (Overlap(2, predicted=1), 2.0),
        (Overlap(7), 0.0),
    ],
)
def test_encoding_counts_items_that_the_cached_prefix_does_not_contain(overlap: Overlap, work: float) -> None:
    slot, model = WorkerRank("w", 0), CostModel(encoder_load_scale=0.5)
    bare, demand = Demand(10), Demand(10, encoding=((3, 8.0), (7, 4.0)))
    with_media, without = (cache_aware(slot, overlap, 0, each, model) for each in (demand, bare))
    assert with_media.uncached - without.uncached == pytest.approx(work)
    assert with_media.book_prefill - without.book_prefill == work * 1000
    assert (with_media.added, with_media.book_decode) == (without.added, without.book_decode)
    assert load_only(slot, overlap, 0, demand, model).uncached == 10 + 6


BLOCK = 16
MANY = 200


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), min_size=1, max_size=60), st.integers(1, 40))
def test_no_rank_left_out_is_cheaper_than_one_taken(ranks: list[tuple[int, int]], most: int) -> None:
    slots = [WorkerRank(f"w{number}", 0) for number in range(len(ranks))]
    overlaps = {slot: Overlap(depth) for slot, (depth, _) in zip(slots, ranks, strict=True) if depth}
    booked = {slot: (load / 2, float(load)) for slot, (_, load) in zip(slots, ranks, strict=True) if load}
    demand, model = Demand(20), CostModel(prefill_load_scale=2.0)
    samples = {overlap: cache_aware(slots[0], overlap, 0, demand, model) for overlap in map(Overlap, range(10))}

    def cost(slot: WorkerRank) -> float:
        load = Load(*booked.get(slot, (0.0, 0.0)))
        return cache_aware(slot, overlaps.get(slot, NO_OVERLAP), 0, demand, model).cost(load, 2.0)

    taken = preselect(slots, overlaps, samples, booked, 2.0, Random(1), most)
    assert len(taken) == len(set(taken)) == min(most, len(slots))
    left = set(slots) - set(taken)
    assert not left or max(map(cost, taken)) <= min(map(cost, left))


def test_equally_cheap_ranks_take_turns() -> None:
    slots = [WorkerRank(f"w{number}", 0) for number in range(MANY)]
    random, samples = Random(1), {NO_OVERLAP: cache_aware(slots[0], NO_OVERLAP, 0, Demand(1), CostModel())}
    seen = {slot for _ in range(100) for slot in preselect(slots, {}, samples, {}, 1.0, random)}
    assert seen == set(slots)


def test_what_is_booked_here_counts_until_loads_are_read_again() -> None:
    standing, slot = LoadSnapshot(), WorkerRank("w", 0)
    loads = {slot: Load(1.0, 2.0, 1)}
    assert standing.booked(loads)[slot] == (1.0, 2.0)
    standing.add([cache_aware(slot, Overlap(3), 0, Demand(10), CostModel())])
    assert standing.booked(loads)[slot] == (1.0 + 7, 2.0 + 7)
    assert standing.booked(dict(loads))[slot] == (1.0, 2.0)


def stored(sequence: int, *hashes: int) -> EventBatch:
    return EventBatch(0, sequence, (BlockOp(CacheOperation.STORED, Tier.DEVICE, pack_u64(hashes)),))


@pytest.fixture
async def crowd() -> Router:
    """A router with many workers; one holds a prompt."""
    router = Router(MemoryStore(random=Random(1)), random=Random(2))
    router.start()
    await router.ready.wait()
    for number in range(MANY):
        name = f"w{number:03}"
        card = Worker(name, f"{name}:1", 1, "m", Role.AGGREGATED, BLOCK, "sluice-xxh3-v1", 1 << 20, 1, b"")
        attachment, _ = await router.worker_manager.attach(card)
        if number == MANY - 1:
            await attachment.handle([stored(1, *range(1, 101))])
    return router


def query(request_id: str, prompt: range, explain: bool = False) -> Query:
    hashed = Prompt(block_hashes=pack_u64(prompt), block_size=BLOCK)
    return Query("m", hashed, CostModel(), request_id, explain=explain)


async def test_among_many_the_one_with_the_prompt_is_found(crowd: Router) -> None:
    route = await crowd.query(query("r1", range(1, 101)))
    assert (route.worker.worker_id, route.best_overlap_blocks) == (f"w{MANY - 1:03}", 100)
    explained = await crowd.query(query("", range(1, 101), explain=True))
    assert len(explained.scores) == MANY
    await crowd.close()


async def test_among_many_equal_ones_requests_spread_evenly(crowd: Router) -> None:
    prompts = [range(1000 * turn, 1000 * turn + 10) for turn in range(1, 2 * MANY)]
    places = [(await crowd.query(query(f"r{each.start}", each))).worker.worker_id for each in prompts]
    assert max(map(places.count, set(places))) <= 3
    assert len(set(places)) >= MANY - 1
    await crowd.close()
