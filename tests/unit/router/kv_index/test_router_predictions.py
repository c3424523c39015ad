"""Predicted blocks: what is expected, for how long, and that it never mixes with what is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.base.packing import pack_u64
from services.common.types.hashing import block_hashes
from services.router.router import RouterConfig
from services.router.scheduling.decisions import Outcome
from services.router.state.kv_index.events import BlockOp, CacheOperation, EventBatch, Tier
from services.router.state.kv_index.index import NO_OVERLAP, Overlap
from services.router.state.kv_index.predictions import Lifetimes, Predictions
from services.router.state.reservations.cost import Load
from services.router.state.workers.worker import KV_EVENTS, WorkerRank
from tests.support.fakes.clock import Clock
from tests.support.servers.routing import BLOCK, Cluster, prompt, tokens, worker

A, B = WorkerRank("a", 0), WorkerRank("b", 0)
LIVES = Lifetimes(no_events_s=100, bridge_s=2, computing_s=10, most_blocks=50)


class Expected:
    """Predictions on a clock of the test; nothing is observed unless it says so."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.held = Predictions(LIVES, self.clock)
        self.requests = 0

    def overlap(self, slot: WorkerRank, hashes: Sequence[int], observed: int = 0) -> Overlap:
        return self.held.extend({slot: Overlap(observed)} if observed else {}, hashes).get(slot, NO_OVERLAP)

    def send(
        self, slot: WorkerRank, hashes: Sequence[int], silent: bool = False, observed: int = 0, capacity: int = 0
    ) -> str:
        self.requests += 1
        request_id = f"r{self.requests}"
        self.held.add(slot, hashes, self.overlap(slot, hashes, observed), request_id, silent, capacity)
        return request_id


@pytest.fixture
def expected() -> Expected:
    return Expected()


def test_what_was_sent_is_expected_and_only_there(expected: Expected) -> None:
    expected.send(A, range(10, 20))
    assert expected.overlap(A, range(10, 20)) == Overlap(predicted=10, computing=10)
    assert expected.overlap(A, [*range(10, 15), 99, 98]) == Overlap(predicted=5, computing=5)
    assert expected.overlap(A, [10]) == Overlap(predicted=1, computing=1)
    assert expected.overlap(A, [11, 12]) == NO_OVERLAP
    assert expected.overlap(B, range(10, 20)) == NO_OVERLAP


def test_only_what_is_not_known_is_predicted(expected: Expected) -> None:
    expected.send(A, range(10, 20), observed=4)
    assert expected.overlap(A, range(10, 20), observed=4) == Overlap(4, predicted=6, computing=6)
    assert expected.overlap(A, range(10, 20), observed=7) == Overlap(7, predicted=3, computing=3)
    assert expected.overlap(A, range(10, 20), observed=10) == Overlap(10)
    assert expected.overlap(A, range(10, 20), observed=3) == Overlap(3), "what it stood on is gone"


def test_a_bridge_ends_soon_after_the_prompt_is_computed(expected: Expected) -> None:
    request_id = expected.send(A, [1, 2, 3])
    expected.send(A, [1, 2, 3, 4])
    expected.clock.now += 5
    assert expected.overlap(A, [1, 2, 3]) == Overlap(predicted=3, computing=3)
    expected.held.mark_computed(request_id)
    expected.clock.now += 1.9
    assert expected.overlap(A, [1, 2, 3, 4]) == Overlap(predicted=4, computing=1)
    expected.clock.now += 0.2
    assert expected.overlap(A, [1, 2, 3, 4]) == NO_OVERLAP
    expected.held.drop_expired()
    assert expected.held.blocks(A) == 1


def test_a_bridge_is_not_endless_and_a_silent_rank_is_believed_longer(expected: Expected) -> None:
    expected.send(A, [1, 2, 3])
    expected.send(B, [1, 2, 3], silent=True)
    expected.clock.now += 9.9
    assert expected.overlap(A, [1, 2, 3]).predicted == 3
    expected.clock.now += 0.2
    assert expected.overlap(A, [1, 2, 3]) == NO_OVERLAP
    assert expected.overlap(B, [1, 2, 3]) == Overlap(predicted=3), "by now it is computed"
    expected.clock.now += 90
    expected.send(B, [1, 2, 3, 4], silent=True)
    expected.clock.now += 90
    assert expected.overlap(B, [1, 2, 3, 4]).predicted == 4, "use prolongs"
    expected.clock.now += 20
    assert expected.overlap(B, [1, 2, 3, 4]) == NO_OVERLAP
    expected.held.drop_expired()
    assert len(expected.held) == expected.held.blocks(A) == expected.held.blocks(B) == 0


def test_computed_blocks_are_not_speculative(expected: Expected) -> None:
    request_id = expected.send(A, [1, 2, 3])
    expected.held.mark_computed(request_id)
    assert expected.overlap(A, [1, 2, 3]) == Overlap(predicted=3)
    expected.held.mark_computed("unknown")


def test_ended_request_drops_predictions_except_on_ranks_without_events(expected: Expected) -> None:
    expected.held.end_request(expected.send(A, [1, 2]))
    assert expected.overlap(A, [1, 2]) == NO_OVERLAP
    expected.held.end_request(expected.send(A, [1, 2], silent=True))
    assert expected.overlap(A, [1, 2]) == Overlap(predicted=2)
    expected.held.end_request(expected.send(A, [1, 2, 3], silent=True), ran=False)
    assert expected.overlap(A, [1, 2, 3]) == Overlap(predicted=2), "it never ran"
    expected.held.end_request("unknown")


def test_events_take_the_place_of_predictions(expected: Expected) -> None:
    expected.send(A, [1, 2, 3])
    expected.send(A, [1, 2, 13])
    expected.held.drop_confirmed(A, {1, 2}.__contains__)
    assert expected.held.blocks(A) == 4
    expected.held.drop_confirmed(A, {1, 2, 3}.__contains__)
    assert expected.held.blocks(A) == 1
    assert expected.overlap(A, [1, 2, 13], observed=2) == Overlap(2, predicted=1, computing=1)
    expected.held.drop_rank(A)
    assert len(expected.held) == 0


def test_the_longest_unused_goes_when_there_is_too_much(expected: Expected) -> None:
    for number in range(5):
        expected.send(A, range(100 * number, 100 * number + 10), silent=True)
    expected.send(A, range(5), silent=True)
    expected.send(A, range(500, 510), silent=True)
    assert expected.held.blocks(A) == 50
    assert expected.overlap(A, range(100, 110)) == NO_OVERLAP
    assert expected.overlap(A, range(10)).predicted == 10, "it was used again"
    expected.send(B, range(1000), silent=True)
    assert expected.held.blocks(B) == 50, "the beginning is worth more than the end"
    assert expected.overlap(B, range(1000)).predicted == 50
    expected.send(B, range(2000, 3000), silent=True, capacity=20)
    assert expected.held.blocks(B) == 20


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
STEPS = st.lists(st.tuples(st.sampled_from([A, B]), PATHS, st.booleans(), st.floats(0, 7)), min_size=1, max_size=25)


def chained(path: Sequence[int]) -> list[int]:
    """Hashes that depend on everything before them."""
    return [hash(tuple(path[: at + 1])) & 0xFFFFFFFF for at in range(len(path))]


@settings(deadline=None, max_examples=200)
@given(STEPS, PATHS)
def test_predictions_equal_a_table_of_blocks_with_expiry(
    steps: list[tuple[WorkerRank, list[int], bool, float]], asked: list[int]
) -> None:
    expected = Expected()
    table: dict[tuple[WorkerRank, int], float] = {}

    def depth(slot: WorkerRank, hashes: list[int]) -> int:
        reached = 0
        while reached < len(hashes) and table.get((slot, hashes[reached]), 0.0) > expected.clock.now:
            reached += 1
        return reached

    for slot, path, tidy, pause in steps:
        hashes = chained(path)
        known = depth(slot, hashes)
        assert expected.overlap(slot, hashes).predicted == known
        expected.send(slot, hashes)
        table |= {(slot, block): expected.clock.now + LIVES.computing_s for block in hashes[known:]}
        expected.clock.now += pause
        if tidy:
            expected.held.drop_expired()
    for slot in (A, B):
        assert expected.overlap(slot, chained(asked)).predicted == depth(slot, chained(asked))
    expected.clock.now += 20
    expected.held.drop_expired()
    assert len(expected.held) == expected.held.blocks(A) == expected.held.blocks(B) == 0


SHARED = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@pytest.fixture(params=[(), (KV_EVENTS,)], ids=["silent", "with events"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with Cluster(RouterConfig(lifetimes=Lifetimes(computing_s=600))) as made:
        await made.add(*(worker(name, capabilities=request.param) for name in "abcd"))
        yield made


async def siblings(cluster: Cluster, count: int, shared: str = SHARED) -> list[str]:
    routes = await asyncio.gather(
        *(cluster.ask(prompt(f"{shared}{chr(300 + n)}"), request_id=f"{shared[:1]}{n}") for n in range(count))
    )
    return [route.worker.worker_id for route in routes]


async def test_a_burst_of_siblings_stays_together(cluster: Cluster) -> None:
    assert len(set(await siblings(cluster, 16))) == 1
    (load,) = [load for load in (await cluster.loads()).values() if load.requests]
    assert load == Load(len(SHARED) + 16, len(SHARED) + 16, 16), "what they share is booked once"
    other = await siblings(cluster, 16, SHARED.swapcase())
    assert len(set(other)) == 1
    assert sorted(load.requests for load in (await cluster.loads()).values()) == [0, 0, 16, 16]


async def test_a_burst_spreads_when_the_load_gets_too_high(cluster: Cluster) -> None:
    assert len(set(await siblings(cluster, 60))) > 1


async def test_predictions_are_shown_apart_and_never_in_the_index(cluster: Cluster) -> None:
    first = await cluster.ask(prompt(SHARED), request_id="r1")
    again = await cluster.ask(prompt(SHARED))
    assert again.worker == first.worker
    assert again.overlap == Overlap(predicted=len(SHARED), computing=len(SHARED))
    assert again.best_overlap_blocks == 0
    assert again.tokens_to_compute == len(SHARED) * BLOCK
    (view,) = cluster.router.indexes("m")
    assert view.index.distinct_blocks == 0
    assert cluster.router.overlaps("m", prompt(SHARED)) == {WorkerRank(first.worker.worker_id, 0): again.overlap}


async def test_a_query_that_books_nothing_predicts_nothing(cluster: Cluster) -> None:
    await cluster.ask(prompt(SHARED))
    assert cluster.router.overlaps("m", prompt(SHARED)) == {}


async def test_credit_zero_turns_them_off(cluster: Cluster) -> None:
    from dataclasses import replace

    from tests.support.servers.routing import COST

    off = replace(COST, predicted_credit=0.0)
    await cluster.ask(prompt(SHARED), request_id="r1", cost=off)
    await cluster.ask(prompt(SHARED), request_id="r2", cost=off)
    assert sorted(load.requests for load in (await cluster.loads()).values()) == [0, 0, 1, 1]


async def test_events_and_losses_end_predictions() -> None:
    async with Cluster() as cluster:
        await cluster.add(worker("a", capabilities=(KV_EVENTS,)))
        (view,) = cluster.router.indexes("m")
        hashes = pack_u64(block_hashes(tokens("ABC"), BLOCK))
        slot = WorkerRank("a", 0)
        await cluster.ask(prompt("ABC"), request_id="r1")
        assert view.predictions.blocks(slot) == 3
        await cluster.cache("m", slot, hashes)
        assert view.predictions.blocks(slot) == 0
        assert (await cluster.ask(prompt("ABC"))).overlap == Overlap(3)
        removed = EventBatch(0, 2, (BlockOp(CacheOperation.REMOVED, Tier.DEVICE, hashes),))
        await cluster.attachments["m", "a"].handle([removed])
        assert (await cluster.ask(prompt("ABC"))).overlap == NO_OVERLAP, "a removed block does not come back"
        await cluster.ask(prompt("DEF"), request_id="r2")
        cleared = EventBatch(0, 3, (BlockOp(CacheOperation.CLEARED, Tier.DEVICE, b""),))
        await cluster.attachments["m", "a"].handle([cleared])
        assert view.predictions.blocks(slot) == 0
        await cluster.ask(prompt("XYZ"), request_id="r3")
        await cluster.lose(cluster.attachments["m", "a"])
        assert len(view.predictions) == 0


async def test_the_end_of_a_request_that_never_ran_ends_its_prediction() -> None:
    async with Cluster() as cluster:
        await cluster.add(worker("a"))
        for outcome, left in ((Outcome("m:r1", None, 0), 0), (Outcome("m:r2", 0, 5), 3)):
            request_id = outcome.reservation_id.partition(":")[2]
            await cluster.ask(prompt("ABC"), request_id=request_id)
            await cluster.router.lifecycle.free([outcome.reservation_id], [outcome])
            assert cluster.router.indexes("m")[0].predictions.blocks(WorkerRank("a", 0)) == left
