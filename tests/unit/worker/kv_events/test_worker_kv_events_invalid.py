"""Events that make no sense while the worker serves: what is lost is said, and nothing ends."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
import zmq
from smg_grpc_proto.generated import common_pb2

from services.common.errors import SluiceError
from services.worker.engines.vllm_grpc import feed as grpc_feed
from services.worker.engines.vllm_grpc.feed import GrpcFeed
from services.worker.kv_events.events import EngineBatch, EngineStored, MalformedEvents
from services.worker.kv_events.source import EngineCacheSource
from services.worker.kv_events.wire import decode
from services.worker.kv_events.zmq_feed import ZmqFeed


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
def test_an_event_without_a_size_says_nothing_about_the_settings(feed: Any) -> None:
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
        raise MalformedEvents("nobody foresaw it")

    kv = source()
    engine = OverGrpc(kv)
    engine.say(0, stored(1))
    with monkeypatch.context() as patched:
        patched.setattr(grpc_feed.wire, "read_batch", unreadable)
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
