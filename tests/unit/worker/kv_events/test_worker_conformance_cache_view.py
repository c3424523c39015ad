"""The kit's view of a cache, told in events and snapshots."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from services.common.packing import pack_u64, unpack_u64
from sluice.conformance.watching import RankView, Watcher
from sluice.v1 import common_pb2, router_pb2

HASHES = st.lists(st.integers(0, 30), max_size=6)


def batch(sequence: int, stored: list[int] = [], removed: list[int] = []) -> router_pb2.KvEventBatch:  # noqa: B006
    events = [
        router_pb2.KvEvent(stored=router_pb2.BlocksStored(block_hashes=pack_u64(stored))),
        router_pb2.KvEvent(removed=router_pb2.BlocksRemoved(block_hashes=pack_u64(removed))),
    ]
    return router_pb2.KvEventBatch(sequence=sequence, events=events)


def snapshot(sequence: int, hashes: list[int]) -> list[router_pb2.Snapshot]:
    part = router_pb2.Snapshot(sequence=sequence, block_hashes=pack_u64(hashes))
    return [part, router_pb2.Snapshot(sequence=sequence, last=True)]


@given(st.lists(st.tuples(HASHES, HASHES), max_size=8), st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_a_snapshot_is_compared_with_the_events_before_it(
    steps: list[tuple[list[int], list[int]]], lost: set[int], gained: set[int]
) -> None:
    view, truth = RankView(), set()
    for number, (stored, removed) in enumerate(steps, 1):
        view.take_batch(batch(number, stored, removed))
        truth |= set(stored)
        truth -= set(removed)
    assert view.hashes == truth
    assert view.faults == []
    reported = (truth - lost) | gained
    for part in snapshot(len(steps), sorted(reported)):
        view.take_snapshot(part)
    assert (view.lost, view.gained) == (len(truth - reported), len(reported - truth))
    assert view.hashes == reported


def test_a_snapshot_ahead_of_the_events_is_not_compared() -> None:
    view = RankView()
    view.take_batch(batch(1, [1]))
    for part in snapshot(3, [1, 2]):
        view.take_snapshot(part)
    assert (view.lost, view.gained, view.snapshots) == (None, None, 1)
    view.take_batch(batch(4, [3]))
    assert view.hashes == {1, 2, 3}
    assert view.faults == []


def test_holes_repeats_and_broken_hashes_are_faults() -> None:
    view = RankView()
    view.take_batch(batch(1))
    view.take_batch(batch(3))
    view.take_batch(batch(3))
    broken = batch(4, [1])
    broken.events[0].stored.block_hashes = b"123"
    view.take_batch(broken)
    for part in snapshot(2, []):
        view.take_snapshot(part)
    assert len(view.faults) == 4
    assert view.faults[0] == "batch 3 follows number 1"


def test_the_same_hash_on_two_tiers_is_two_blocks() -> None:
    view = RankView()
    view.take_batch(batch(1, [5]))
    host = router_pb2.BlocksStored(block_hashes=pack_u64([5]), tier=common_pb2.CACHE_TIER_HOST)
    view.take_batch(router_pb2.KvEventBatch(sequence=2, events=[router_pb2.KvEvent(stored=host)]))
    view.take_batch(batch(3, [], [5]))
    assert view.hashes == {5}
    assert view.blocks == {(common_pb2.CACHE_TIER_HOST, 5)}
    assert unpack_u64(host.block_hashes).tolist() == [5]


async def test_a_worker_that_registers_elsewhere_is_waited_for_once() -> None:
    watcher = Watcher()
    assert not await watcher.registered(within_s=0.01)
    assert not await asyncio.wait_for(watcher.registered(within_s=3600), timeout=20)
    watcher.registration = router_pb2.Registration()
    assert await watcher.registered(within_s=3600)
