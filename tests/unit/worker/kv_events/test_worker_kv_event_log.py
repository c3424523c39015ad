"""The worker's account of its cache: numbered batches or a snapshot always lead a router to the same set."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheTier, KvEvent
from services.worker.kv_events.event_log import BACKLOG_BATCHES, KvEventLog, chunks


def stored(*hashes: int, tier: CacheTier = CacheTier.DEVICE) -> BlocksStored:
    return BlocksStored(array("Q", hashes), tier)


def removed(*hashes: int) -> BlocksRemoved:
    return BlocksRemoved(array("Q", hashes))


class EventSequencer:
    """A router's side, as small as possible."""

    def __init__(self) -> None:
        self.sequence = 0
        self.present: set[int] = set()

    def follow(self, kv_log: KvEventLog) -> None:
        batches = kv_log.batches_after(self.sequence)
        if batches is None:
            self.present = set(kv_log.snapshot().get(CacheTier.DEVICE, array("Q")))
            self.sequence = kv_log.sequence
            return
        for batch in batches:
            assert batch.sequence == self.sequence + 1
            self.sequence = batch.sequence
            self._apply(batch.events)

    def _apply(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                self.present.update(event.hashes)
            elif isinstance(event, BlocksRemoved):
                self.present.difference_update(event.hashes)
            else:
                self.present.clear()


def test_sequence_numbers_start_at_one_and_steps_share_a_batch_until_taken() -> None:
    kv_log = KvEventLog(0)
    assert kv_log.batches_after(0) == []
    kv_log.record([stored(1)])
    kv_log.record([stored(2), removed(1)])
    (batch,) = kv_log.batches_after(0) or []
    assert batch.sequence == 1
    assert batch.events == [stored(1, 2), removed(1)]
    kv_log.record([stored(3)])
    assert [batch.sequence for batch in kv_log.batches_after(0) or []] == [1, 2]
    assert [batch.sequence for batch in kv_log.batches_after(1) or []] == [2]


def test_recorded_events_belong_to_the_log() -> None:
    kv_log = KvEventLog(0)
    mine = stored(1)
    kv_log.record([mine])
    kv_log.record([stored(2)])
    assert list(mine.hashes) == [1]


def test_a_router_that_is_too_far_behind_or_ahead_gets_a_snapshot() -> None:
    kv_log = KvEventLog(0)
    for number in range(BACKLOG_BATCHES + 5):
        kv_log.record([stored(number)])
        kv_log.batches_after(0)
    assert kv_log.batches_after(0) is None
    assert kv_log.batches_after(4) is None
    assert len(kv_log.batches_after(5) or []) == BACKLOG_BATCHES
    assert kv_log.batches_after(kv_log.sequence + 1) is None
    assert len(kv_log.snapshot()[CacheTier.DEVICE]) == BACKLOG_BATCHES + 5


def test_tiers_are_kept_apart_and_cleared_together() -> None:
    kv_log = KvEventLog(0)
    kv_log.record([stored(1), stored(1, tier=CacheTier.HOST)])
    assert {tier: list(hashes) for tier, hashes in kv_log.snapshot().items()} == {
        CacheTier.DEVICE: [1],
        CacheTier.HOST: [1],
    }
    kv_log.record([CacheCleared()])
    assert kv_log.snapshot() == {}


def test_clearing_drops_what_was_not_sent_yet() -> None:
    kv_log = KvEventLog(0)
    kv_log.record([stored(1), CacheCleared(), stored(2)])
    (batch,) = kv_log.batches_after(0) or []
    assert batch.events == [CacheCleared(), stored(2)]


def test_chunks_cover_everything_and_an_empty_cache_is_one_chunk() -> None:
    assert [list(piece) for piece in chunks(array("Q", range(5)), 2)] == [[0, 1], [2, 3], [4]]
    assert [list(piece) for piece in chunks(array("Q"), 2)] == [[]]


events = st.one_of(
    st.sets(st.integers(0, 20), min_size=1).map(lambda hashes: stored(*hashes)),
    st.sets(st.integers(0, 20), min_size=1).map(lambda hashes: removed(*hashes)),
    st.just(CacheCleared()),
)


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.tuples(st.lists(events, max_size=4), st.booleans()), max_size=25))
def test_followers_that_read_at_different_times_agree(steps: list[tuple[list[KvEvent], bool]]) -> None:
    kv_log = KvEventLog(0)
    eager, lazy = EventSequencer(), EventSequencer()
    truth = EventSequencer()
    for step, read in steps:
        kv_log.record(step)
        truth._apply(step)
        eager.follow(kv_log)
        if read:
            lazy.follow(kv_log)
        assert eager.present == truth.present
    lazy.follow(kv_log)
    assert lazy.present == truth.present
    assert lazy.sequence == eager.sequence == kv_log.sequence
