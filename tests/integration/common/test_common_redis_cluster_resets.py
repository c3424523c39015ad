"""Connections to a Redis Cluster that are reset while they are idle: lost like any other, under uvloop too."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis.exceptions import ConnectionError as ConnectionLost

from services.common.net.ports import free_port
from services.common.redis.failures import FAILURES, closed_is_lost
from services.common.redis.scripts import Script, ScriptRunner
from services.common.redis.servers import RedisServers
from services.common.redis.target import parse
from services.router.state.store.base import StoreUnavailable
from services.router.state.store.redis import RedisStore
from services.router.state.store.redis_client import RedisClient
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.redis_topologies import SLOTS, ask, wait_for

ONE = Script("return 1")
RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class Wire:
    """The only way to a cluster of one server; `reset` takes all connections away as a firewall does."""

    def __init__(self, port: int, server: RedisServer) -> None:
        self.port = port
        self._server = server
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.port}"

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection("127.0.0.1", self._server.port)
        self._writers.append(writer)
        async with asyncio.TaskGroup() as passing:
            passing.create_task(self._pass(reader, to_there))
            passing.create_task(self._pass(there, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
        except (ConnectionError, RuntimeError):
            pass  # either side is gone
        finally:
            writer.close()

    async def reset(self) -> None:
        open_writers = [writer for writer in self._writers if not writer.is_closing()]
        assert open_writers
        for writer in open_writers:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
            writer.transport.abort()
        self._writers.clear()
        await asyncio.sleep(0.2)  # the other side is to see it before it writes


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, int]]:
    port = free_port()
    cluster = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-announce-port", str(port))
    made = RedisServer(tmp_path_factory.mktemp("redis"), *cluster)
    made.start()
    ask(made.port, "CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
    wait_for(lambda: b"cluster_state:ok" in ask(made.port, "CLUSTER", "INFO"), "the cluster is there")
    yield made, port
    made.stop()


@asynccontextmanager
async def wired(server: tuple[RedisServer, int]) -> AsyncIterator[Wire]:
    wire = Wire(server[1], server[0])
    listening = await asyncio.start_server(wire.connected, "127.0.0.1", wire.port)
    try:
        yield wire
    finally:
        listening.close()


def under_uvloop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 60)

    uvloop.run(bounded())


def test_the_store_connects_again(server: tuple[RedisServer, int], tmp_path: Path) -> None:
    async def test() -> None:
        async with wired(server) as wire:
            store = RedisStore(wire.url, tmp_path.name, timeout_s=10)
            await store.ping()
            assert (await store.load("m")).workers == []
            await wire.reset()
            assert (await store.load("m")).workers == [], "found out before anything is sent"
            await store.close()

    under_uvloop(test)


def test_a_command_connects_again(server: tuple[RedisServer, int]) -> None:
    async def test() -> None:
        async with wired(server) as wire:
            client = RedisClient(RedisServers(parse(wire.url), 10), timeout_s=10)
            assert await client.command("k", "GET", "k") is None
            await wire.reset()
            assert await client.command("k", "GET", "k") is None, "found out before anything is sent"
            await client.close()

    under_uvloop(test)


def test_what_gateways_share_fails_by_a_name_they_know(server: tuple[RedisServer, int]) -> None:
    async def test() -> None:
        async with wired(server) as wire:
            runner = ScriptRunner(parse(wire.url), timeout_s=10)
            assert await runner.run(ONE, ["k"], []) == 1
            await wire.reset()
            with pytest.raises(FAILURES):
                await runner.run(ONE, ["k"], [])
            assert await runner.run(ONE, ["k"], []) == 1
            await runner.close()

    under_uvloop(test)


def test_script_that_only_reads_is_sent_again_after_a_reset(server: tuple[RedisServer, int]) -> None:
    async def test() -> None:
        async with wired(server) as wire:
            runner = ScriptRunner(parse(wire.url), timeout_s=10)
            for _ in range(3):
                assert await runner.run(ONE, ["k"], [], reads=True) == 1
                await wire.reset()
            await runner.close()

    under_uvloop(test)


def test_only_a_closed_connection_is_a_lost_one() -> None:
    closed = "unable to perform operation on <TCPTransport closed=True reading=False 0x1>; the handler is closed"
    with pytest.raises(ConnectionLost), closed_is_lost():
        raise RuntimeError(closed)
    with pytest.raises(RuntimeError, match="ours"), closed_is_lost():
        raise RuntimeError("a mistake of ours")


async def test_a_mistake_of_ours_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = RedisClient(RedisServers(parse("redis://127.0.0.1:1"), 10), timeout_s=10, lanes=1)

    async def broken(key: str, deadline: float) -> None:
        await asyncio.sleep(0)
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(client, "_connect", broken)
    first = asyncio.ensure_future(client.run("models", "{t}", 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = asyncio.ensure_future(client.run_many("models", "{t}", [[1]]))
    async with asyncio.timeout(10):
        for answer in (first, second):
            with pytest.raises(StoreUnavailable, match="ours"):
                await answer
    assert any("by a mistake" in each.getMessage() for each in caplog.records), "it is logged"
    await client.close()
