"""KV events over real sockets, from a publisher as vLLM and SGLang have it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from services.common.base.errors import SluiceError
from services.common.net.ports import free_port
from services.common.types.hashing import block_hashes
from services.worker.kv_events import zmq_feed
from services.worker.kv_events.source import EngineCacheSource
from services.worker.kv_events.zmq_feed import END_OF_REPLAY, ZmqFeed
from tests.support.waiting import until

DEADLINE_S = 30


class Publisher:
    """PUB socket and replaying ROUTER."""

    def __init__(self, endpoint: str, replay_endpoint: str, *, connects: bool = False) -> None:
        self.log: list[bytes] = []
        self.replays = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.open(endpoint, connects=connects)
        self.replays.bind(replay_endpoint)
        self.replayer = asyncio.get_running_loop().create_task(self.serve_replays())

    def open(self, endpoint: str, *, connects: bool = False) -> None:
        self.events = zmq.asyncio.Context.instance().socket(zmq.PUB)
        (self.events.connect if connects else self.events.bind)(endpoint)

    async def store(self, name: int, *, heard: bool = True) -> None:
        event = {"type": "BlockStored", "block_hashes": [name], "token_ids": [name] * 4, "block_size": 4}
        await self.publish(msgspec.msgpack.encode([float(len(self.log)), [event], 0]), heard=heard)

    async def publish(self, payload: bytes, *, heard: bool = True) -> None:
        self.log.append(payload)
        if heard:
            await self.events.send_multipart([b"kv", (len(self.log) - 1).to_bytes(8, "big"), payload])

    async def serve_replays(self) -> None:
        while True:
            client, _, start = await self.replays.recv_multipart()
            for number in range(int.from_bytes(start, "big"), len(self.log)):
                answer = [client, b"", b"kv", number.to_bytes(8, "big"), self.log[number]]
                await self.replays.send_multipart(answer)
            await self.replays.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        self.replayer.cancel()
        self.events.close(linger=0)
        self.replays.close(linger=0)


@asynccontextmanager
async def following(feed: ZmqFeed) -> AsyncGenerator[asyncio.Task[None], None]:
    task = asyncio.get_running_loop().create_task(feed.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def source() -> EngineCacheSource:
    return EngineCacheSource(0, 4, counts_copies=True, can_replay=True)


async def test_a_subscriber_that_comes_late_and_misses_some_has_it_all_in_the_end(tmp_path: Path) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    publisher, kv = Publisher(endpoint, replay), source()
    try:
        for name in range(5):
            await publisher.store(name)
        async with following(ZmqFeed(kv.sequencer, endpoint, replay)):
            await until(lambda: kv.translator.held() == 5)
            await publisher.store(5, heard=False)
            await publisher.store(6)
            await until(lambda: kv.translator.held() == 7)
        (stored,) = kv.translator.snapshot()
        assert set(stored.hashes) == {block_hashes([name] * 4, 4)[0] for name in range(7)}  # type: ignore[union-attr]
        assert kv.degraded == ""
    finally:
        publisher.close()


async def test_connection_that_breaks_and_returns_is_caught_up_by_a_replay_without_a_later_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_feed, "IDLE_S", 3600.0)
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    publisher, kv = Publisher(endpoint, replay), source()
    try:
        async with following(ZmqFeed(kv.sequencer, endpoint, replay)):
            await publisher.store(0)
            await until(lambda: kv.translator.held() == 1)
            publisher.events.close(linger=0)
            await publisher.store(1, heard=False)
            await until(lambda: kv.translator.held() == 2)
            await publisher.store(2, heard=False)
            publisher.open(endpoint)
            await until(lambda: kv.translator.held() == 3)
            assert kv.degraded == ""
    finally:
        publisher.close()


async def test_connection_that_breaks_without_a_replay_drops_all_blocks_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_feed, "IDLE_S", 3600.0)
    endpoint = f"ipc://{tmp_path}/events"
    publisher = Publisher(endpoint, f"ipc://{tmp_path}/replay")
    kv = EngineCacheSource(0, 4, counts_copies=True, can_replay=False)
    try:
        async with following(ZmqFeed(kv.sequencer, endpoint)):
            await publisher.store(0, heard=False)

            async def publish_until_received(name: int) -> None:
                while not kv.translator.holds(block_hashes([name] * 4, 4)):
                    await publisher.store(name)
                    await asyncio.sleep(0.05)

            async with asyncio.timeout(DEADLINE_S):
                await publish_until_received(1)
                publisher.events.close(linger=0)
                await until(lambda: kv.translator.held() == 0)
                publisher.open(endpoint)
                await publish_until_received(2)
            assert not kv.translator.holds(block_hashes([1] * 4, 4)), "it may be gone from the engine"
            assert kv.degraded == "kv_events_lost"
    finally:
        publisher.close()


async def test_a_publisher_that_connects_finds_a_subscriber_that_binds(tmp_path: Path) -> None:
    endpoint, replay = f"tcp://127.0.0.1:{free_port()}", f"ipc://{tmp_path}/replay"
    kv = source()
    feed = ZmqFeed(kv.sequencer, endpoint, replay, "kv", binds=True)
    feed.open()
    publisher = Publisher(endpoint, replay, connects=True)
    try:
        async with following(feed):
            await publisher.store(1)
            await until(lambda: kv.translator.held() == 1)
    finally:
        publisher.close()


async def test_a_restarted_engine_starts_from_nothing(tmp_path: Path) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    first, kv = Publisher(endpoint, replay), source()
    async with following(ZmqFeed(kv.sequencer, endpoint, replay)):
        for name in range(4):
            await first.store(name)
        await until(lambda: kv.translator.held() == 4)
        first.close()
        second = Publisher(endpoint, replay)
        try:
            second.log.append(msgspec.msgpack.encode([100.0, [], 0]))
            await until_heard(second, kv)
            assert kv.translator.held() <= 2
        finally:
            second.close()


async def until_heard(publisher: Publisher, kv: EngineCacheSource) -> None:
    """Says the same again until the subscriber has connected anew; its number is always below the old ones."""
    event = {"type": "BlockStored", "block_hashes": [77], "token_ids": [77] * 4, "block_size": 4}
    payload = msgspec.msgpack.encode([101.0, [event], 0])
    publisher.log.append(payload)
    wanted = block_hashes([77] * 4, 4)[0]
    async with asyncio.timeout(DEADLINE_S):
        while wanted not in {found for event in kv.translator.snapshot() for found in event.hashes}:  # type: ignore[union-attr]
            await publisher.events.send_multipart([b"kv", (1).to_bytes(8, "big"), payload])
            await asyncio.sleep(0.05)


def test_an_endpoint_that_cannot_be_opened_is_named() -> None:
    feed = ZmqFeed(source().sequencer, "nowhere://x")
    with pytest.raises(SluiceError, match="nowhere://x"):
        feed.open()
