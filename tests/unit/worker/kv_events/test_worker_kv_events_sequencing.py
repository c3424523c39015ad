"""Missed, repeated, restarted and invalid events: the mirror becomes the cache of the engine."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2

from services.common.base.errors import SluiceError
from services.common.types.hashing import block_hashes
from services.worker.contract.cache_events import BlocksStored, CacheCleared, KvEvent
from services.worker.engines.vllm_grpc import wire as grpc_wire
from services.worker.engines.vllm_grpc.feed import GrpcFeed
from services.worker.kv_events.event_sequencer import EventSequencer
from services.worker.kv_events.events import EngineBatch, EngineRemoved, EngineStored, MalformedEvents
from services.worker.kv_events.groups import GroupTranslator
from services.worker.kv_events.source import EngineCacheSource
from services.worker.kv_events.wire import decode
from services.worker.kv_events.zmq_feed import ZmqFeed


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
        self.sequencer = EventSequencer(GroupTranslator(4, counts_copies=True), self.hear, can_replay=can_replay)

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


@pytest.mark.parametrize("sequence", [0, 1, 2])
def test_unreadable_batch_of_a_replay_loses_nothing_if_it_was_processed_before(sequence: int) -> None:
    publisher, heard = Publisher(), ObservedStream()
    for name in (1, 2):
        heard.sequencer.live(*publisher.step(name))
    heard.sequencer.unreadable(sequence, replayed=True)
    assert heard.sequencer.losses == (sequence == 2)
    assert heard.held == (set() if sequence == 2 else hashes(publisher.held))


@pytest.mark.parametrize("replayed_first", [True, False])
def test_unreadable_batch_received_live_and_replayed_is_one_loss(replayed_first: bool) -> None:
    publisher, heard = Publisher(), ObservedStream()
    heard.sequencer.live(*publisher.step(1))
    publisher.step(2)  # the unreadable one
    heard.sequencer.unreadable(1, replayed=replayed_first)
    after = publisher.step(3)
    heard.sequencer.live(*after)
    heard.sequencer.unreadable(1, replayed=not replayed_first)
    heard.sequencer.live(*after)
    assert (heard.held, heard.sequencer.losses, heard.sequencer.expected) == (hashes({3}), 1, 3)


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


def test_batches_missing_from_a_replay_are_a_loss() -> None:
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


@pytest.mark.parametrize(
    ("can_replay", "disturb"),
    [
        pytest.param(False, lambda sequencer: None, id="a gap without a replay"),
        pytest.param(True, lambda sequencer: sequencer.unreadable(1), id="an unreadable batch"),
        pytest.param(False, lambda sequencer: sequencer.interrupted(), id="an interrupted stream"),
    ],
)
def test_batch_missed_without_a_replay_is_a_loss(can_replay: bool, disturb: Callable[[EventSequencer], None]) -> None:
    publisher, observed = Publisher(), ObservedStream(can_replay=can_replay)
    observed.sequencer.live(*publisher.step(1))
    publisher.step(2)
    disturb(observed.sequencer)
    observed.sequencer.live(*publisher.step(3))
    assert (observed.held, observed.sequencer.losses) == (hashes({3}), 1)


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


def test_late_subscriber_receives_the_present_blocks() -> None:
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


def test_late_join_without_a_replay_starts_at_the_first_batch() -> None:
    publisher, heard = Publisher(), ObservedStream(can_replay=False)
    publisher.step(1)
    heard.sequencer.join()
    heard.sequencer.live(*publisher.step(2))
    heard.sequencer.live(*publisher.step(3))
    assert (heard.held, heard.sequencer.losses) == (hashes({2, 3}), 0)


def test_a_snapshot_replaces_everything() -> None:
    publisher, heard = Publisher(), ObservedStream(can_replay=False)
    heard.sequencer.live(*publisher.step(1))
    heard.sequencer.begin_at(7)
    heard.sequencer.live(7, EngineBatch([EngineStored([5], None, array("I", [5] * 4), 4)], 9.0))
    assert (heard.held, heard.sequencer.expected) == (hashes({5}), 8)


def stored(name: int, block_size: int = 4, **fields: Any) -> dict[str, Any]:
    tokens = [name] * max(block_size, 0)
    return {"type": "BlockStored", "block_hashes": [name], "token_ids": tokens, "block_size": block_size, **fields}


def source(*, can_replay: bool = False) -> EngineCacheSource:
    return EngineCacheSource(0, 4, counts_copies=True, can_replay=can_replay)


class OverZmq:
    """What a publisher sends, without the sockets."""

    def __init__(self, kv: EngineCacheSource) -> None:
        self._feed = ZmqFeed(kv.sequencer, "inproc://events")

    def say(self, sequence: int, *events: dict[str, Any]) -> None:
        payload = msgspec.msgpack.encode([float(sequence), list(events), 0])
        self._feed._take([b"kv", sequence.to_bytes(8, "big"), payload])


class OverGrpc:
    """What vLLM's server sends, without the server."""

    def __init__(self, kv: EngineCacheSource) -> None:
        self._feed = GrpcFeed(None, [kv], lambda: None)  # type: ignore[arg-type]

    def say(self, sequence: int, *events: dict[str, Any]) -> None:
        self._feed._take(
            common_pb2.KvEventBatch(
                sequence_number=sequence,
                timestamp=float(sequence),
                events=[common_pb2.KvCacheEvent(stored=_blocks(event)) for event in events],
            )
        )


def _blocks(event: dict[str, Any]) -> Any:
    (block_hash,) = event["block_hashes"]
    block = common_pb2.KvBlock(block_hash=block_hash, token_ids=event["token_ids"], block_size=event["block_size"])
    return common_pb2.KvBlocksStored(blocks=[block])


FEEDS = pytest.mark.parametrize("feed", [OverZmq, OverGrpc])
STRANGE = [
    pytest.param([stored(7, 0, token_ids=[1, 2])], id="no block size"),
    pytest.param([stored(7, -4, token_ids=[1, 2])], id="a negative block size"),
    pytest.param([stored(7, 6)], id="a block size that does not fit"),
    pytest.param([stored(7), stored(8, 6)], id="one event of several"),
]


@FEEDS
@pytest.mark.parametrize("events", STRANGE)
def test_a_strange_event_is_a_loss_and_the_next_ones_are_followed(feed: Any, events: list[dict[str, Any]]) -> None:
    kv = source()
    engine = feed(kv)
    engine.say(0, stored(1))
    engine.say(1, *events)
    assert (kv.sequencer.expected, kv.translator.held(), kv.degraded) == (2, 0, "kv_events_lost")
    engine.say(2, stored(2))
    assert (kv.sequencer.expected, kv.translator.held(), kv.sequencer.losses) == (3, 1, 1)


@FEEDS
def test_settings_that_do_not_fit_the_engine_are_loud_from_the_start(feed: Any) -> None:
    with pytest.raises(SluiceError, match="Set --block-size to the engine's"):
        feed(source()).say(0, stored(1, 6))


@FEEDS
def test_event_without_a_block_size_does_not_contradict_the_settings(feed: Any) -> None:
    kv = source()
    engine = feed(kv)
    engine.say(0, stored(1, 0, token_ids=[1]))
    engine.say(1, stored(2))
    assert (kv.translator.held(), kv.sequencer.losses) == (1, 1)


@pytest.mark.parametrize(
    "fields",
    [{"lora_name": 5}, {"kv_cache_spec_kind": ["full_attention"]}, {"lora_name": ["a"]}],
    ids=["an adapter without a name", "a list of kinds", "a list of adapters"],
)
def test_fields_of_a_wrong_type_are_a_loss(fields: dict[str, Any]) -> None:
    kv = source()
    engine = OverZmq(kv)
    engine.say(0, stored(1))
    engine.say(1, stored(7, **fields))
    engine.say(2, stored(2))
    assert (kv.sequencer.expected, kv.translator.held(), kv.sequencer.losses) == (3, 1, 1)


def test_a_strange_batch_that_comes_twice_is_no_restart() -> None:
    kv = source(can_replay=True)
    strange = EngineBatch([EngineStored([7], None, array("I", [7] * 6), 6)], 1.0)
    later = EngineBatch([EngineStored([8], None, array("I", [8] * 4), 4)], 2.0)
    kv.sequencer.live(0, EngineBatch([EngineStored([1], None, array("I", [1] * 4), 4)], 0.5))
    kv.sequencer.live(2, later)
    kv.sequencer.live(1, strange)
    kv.sequencer.replayed(1, strange)
    kv.sequencer.replayed(2, later)
    kv.sequencer.replay_ended()
    assert (kv.sequencer.expected, kv.translator.held(), kv.sequencer.losses) == (3, 1, 1)


def test_a_message_of_grpc_that_cannot_be_read_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(message: Any) -> EngineBatch:
        raise MalformedEvents("unforeseen")

    kv = source()
    engine = OverGrpc(kv)
    engine.say(0, stored(1))
    with monkeypatch.context() as patched:
        patched.setattr(grpc_wire, "read_batch", unreadable)
        engine.say(1, stored(2))
    engine.say(2, stored(3))
    assert (kv.sequencer.expected, kv.translator.held(), kv.sequencer.losses) == (3, 1, 1)


@pytest.mark.parametrize("rank", [1, -1])
def test_a_rank_that_is_none_of_ours_is_ignored(rank: int) -> None:
    kv = source()
    GrpcFeed(None, [kv], lambda: None)._take(common_pb2.KvEventBatch(dp_rank=rank))  # type: ignore[arg-type]
    assert kv.sequencer.expected == 0


def test_bytes_that_exhaust_the_decoder_are_no_batch() -> None:
    with pytest.raises(MalformedEvents):
        decode(b"\x91" * 100_000 + b"\x90")


async def test_a_replay_that_no_socket_is_left_for_is_a_replay_without_an_answer() -> None:
    class Full:
        def socket(self, kind: int) -> Any:
            raise zmq.ZMQError(24, "Too many open files")

    kv = source(can_replay=True)
    feed = ZmqFeed(kv.sequencer, "inproc://events", "inproc://replays")
    feed._context = Full()  # type: ignore[assignment]
    kv.sequencer.check()
    assert kv.sequencer.replay_from == 0
    await feed._replay(0)
    assert kv.sequencer.replay_from is None
