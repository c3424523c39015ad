"""Whatever is missed, repeated or begun anew: in the end the mirror is the engine's cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.hashing import block_hashes
from services.worker.contract.cache_events import BlocksStored, CacheCleared, KvEvent
from services.worker.kv_events.event_sequencer import EventSequencer
from services.worker.kv_events.events import EngineBatch, EngineRemoved, EngineStored
from services.worker.kv_events.source import EngineCacheSource
from services.worker.kv_events.translation import Translator


def hash_of(name: int) -> int:
    return block_hashes([name] * 4, 4)[0]


class Publisher:
    """An engine that stores and removes blocks of its own, one batch each, and remembers the latest batches."""

    def __init__(self, buffer: int = 1_000) -> None:
        self.buffer = buffer
        self.clock = 0.0
        self.begin()

    def begin(self) -> None:
        self.log: list[EngineBatch] = []
        self.held: set[int] = set()

    def step(self, name: int) -> tuple[int, EngineBatch]:
        self.clock += 1
        if name in self.held:
            self.held.discard(name)
            event: EngineStored | EngineRemoved = EngineRemoved([name])
        else:
            self.held.add(name)
            event = EngineStored([name], None, array("I", [name] * 4), 4)
        self.log.append(EngineBatch([event], self.clock))
        return len(self.log) - 1, self.log[-1]

    def replay(self, start: int) -> list[tuple[int, EngineBatch]]:
        first = max(start, len(self.log) - self.buffer)
        return [(number, self.log[number]) for number in range(first, len(self.log))]


class ObservedStream:
    """The follower's listener."""

    def __init__(self, *, can_replay: bool = True) -> None:
        self.held: set[int] = set()
        self.sequencer = EventSequencer(Translator(4, counts_copies=True), self.hear, can_replay=can_replay)

    def hear(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, CacheCleared):
                self.held.clear()
            elif isinstance(event, BlocksStored):
                self.held.update(event.hashes)
            else:
                self.held.difference_update(event.hashes)

    def replay(self, publisher: Publisher) -> None:
        while (start := self.sequencer.replay_from) is not None:
            for number, batch in publisher.replay(start):
                self.sequencer.replayed(number, batch)
            self.sequencer.replay_ended()


def hashes(names: set[int]) -> set[int]:
    return {hash_of(name) for name in names}


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["heard", "heard", "heard", "missed", "twice", "replay", "check", "restart"]),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_in_the_end_the_mirror_is_the_cache(steps: list[tuple[str, int]]) -> None:
    publisher, heard = Publisher(), ObservedStream()
    for action, name in steps:
        if action == "replay":
            heard.replay(publisher)
        elif action == "check":
            heard.sequencer.check()
        elif action == "restart":
            heard.replay(publisher)  # a subscriber of a dead engine hears nothing more of it
            publisher.begin()
            heard.sequencer.live(*publisher.step(name))
        else:
            message = publisher.step(name)
            for _ in range({"heard": 1, "missed": 0, "twice": 2}[action]):
                heard.sequencer.live(*message)
    heard.sequencer.live(*publisher.step(99))
    heard.replay(publisher)
    assert heard.held == hashes(publisher.held)
    assert heard.sequencer.losses == 0


def test_a_replay_does_not_overtake_what_is_published_meanwhile() -> None:
    publisher, heard = Publisher(), ObservedStream()
    publisher.step(1)
    heard.sequencer.live(*publisher.step(2))
    assert heard.sequencer.replay_from == 0
    answer = publisher.replay(0)
    heard.sequencer.live(*publisher.step(1))  # removed while the replay that says it is stored is on its way
    for number, batch in answer:
        heard.sequencer.replayed(number, batch)
    heard.sequencer.replay_ended()
    assert heard.held == hashes({2})


def test_what_the_engine_forgot_is_a_loss_and_the_mirror_claims_nothing_of_it() -> None:
    publisher, heard = Publisher(buffer=2), ObservedStream()
    heard.sequencer.live(*publisher.step(1))
    for name in range(2, 8):
        publisher.step(name)
    heard.sequencer.live(*publisher.step(8))
    heard.replay(publisher)
    assert heard.sequencer.losses == 1
    assert heard.held == hashes({7, 8})


def test_an_engine_that_does_not_answer_is_a_loss_once() -> None:
    publisher, heard = Publisher(), ObservedStream()
    publisher.step(1)
    heard.sequencer.live(*publisher.step(2))
    heard.sequencer.replay_ended()
    heard.sequencer.live(*publisher.step(3))
    assert (heard.held, heard.sequencer.losses, heard.sequencer.replay_from) == (hashes({2, 3}), 1, None)


def test_without_a_replay_a_gap_is_a_loss() -> None:
    publisher, heard = Publisher(), ObservedStream(can_replay=False)
    heard.sequencer.live(*publisher.step(1))
    publisher.step(2)
    heard.sequencer.live(*publisher.step(3))
    assert (heard.held, heard.sequencer.losses) == (hashes({3}), 1)


def test_a_batch_that_cannot_be_read_is_a_loss() -> None:
    publisher, heard = Publisher(), ObservedStream()
    heard.sequencer.live(*publisher.step(1))
    publisher.step(2)
    heard.sequencer.unreadable(1)
    heard.sequencer.live(*publisher.step(3))
    assert (heard.held, heard.sequencer.losses) == (hashes({3}), 1)


def test_an_unknown_parent_asks_for_the_whole_story_once() -> None:
    heard = ObservedStream()
    child = EngineStored([2], 1, array("I", [2] * 4), 4)
    heard.sequencer.live(0, EngineBatch([child], 1.0))
    assert heard.sequencer.replay_from == 0
    root = EngineStored([1], None, array("I", [1] * 4), 4)
    heard.sequencer.replayed(0, EngineBatch([root, child], 1.0))
    heard.sequencer.replay_ended()
    assert heard.held == set(block_hashes([1] * 4 + [2] * 4, 4))
    heard.sequencer.live(1, EngineBatch([EngineStored([5], 4, array("I", [5] * 4), 4)], 2.0))
    assert heard.sequencer.replay_from is None, "not again and again"


def test_who_listens_late_hears_what_is_there() -> None:
    source = EngineCacheSource(0, 4, counts_copies=True, can_replay=False)
    publisher = Publisher()
    source.sequencer.live(*publisher.step(1))
    late: list[KvEvent] = []
    source.subscribe(late.extend)
    source.sequencer.live(*publisher.step(2))
    assert late == [BlocksStored(array("Q", [hash_of(1)])), BlocksStored(array("Q", [hash_of(2)]))]
    assert source.degraded == ""
    publisher.step(3)
    source.sequencer.live(*publisher.step(4))
    assert source.degraded == "kv_events_lost"


def test_who_joins_late_without_a_replay_takes_the_first_batch_as_it_comes() -> None:
    publisher, heard = Publisher(), ObservedStream(can_replay=False)
    publisher.step(1)
    heard.sequencer.join()
    heard.sequencer.live(*publisher.step(2))
    heard.sequencer.live(*publisher.step(3))
    assert (heard.held, heard.sequencer.losses) == (hashes({2, 3}), 0)


def test_an_interrupted_stream_claims_nothing_of_before() -> None:
    publisher, heard = Publisher(), ObservedStream(can_replay=False)
    heard.sequencer.live(*publisher.step(1))
    heard.sequencer.interrupted()
    publisher.step(2)
    heard.sequencer.live(*publisher.step(3))
    assert (heard.held, heard.sequencer.losses) == (hashes({3}), 1)


def test_a_snapshot_replaces_everything() -> None:
    publisher, heard = Publisher(), ObservedStream(can_replay=False)
    heard.sequencer.live(*publisher.step(1))
    heard.sequencer.begin_at(7)
    heard.sequencer.live(7, EngineBatch([EngineStored([5], None, array("I", [5] * 4), 4)], 9.0))
    assert (heard.held, heard.sequencer.expected) == (hashes({5}), 8)
