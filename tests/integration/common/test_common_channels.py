"""Connections of channels to servers that take their time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.common.rpc.channels import open_channel
from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from sluice.v1 import worker_pb2

DEADLINE_S = 20


class Busy:
    """Passes connections on to a server, each a while after it was accepted."""

    def __init__(self, port: int, delay_s: float) -> None:
        self.connections = 0
        self._port = port
        self._delay_s = delay_s
        self._tasks: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await asyncio.sleep(self._delay_s)
        onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self._port)
        for source, target in ((reader, onward_writer), (onward_reader, writer)):
            task = asyncio.create_task(self._pass_on(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                target.write(data)
        except ConnectionError:
            pass
        finally:
            target.close()


@asynccontextmanager
async def busy(delay_s: float) -> AsyncIterator[tuple[Busy, int]]:
    server = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0"), worker_pb2.DESCRIPTOR)
    await server.start()
    passing = Busy(server.port, delay_s)
    listener = await asyncio.start_server(passing.accept, "127.0.0.1", 0)
    async with listener:
        yield passing, listener.sockets[0].getsockname()[1]
    await server.stop(0)


@pytest.mark.parametrize("delay_s", [0.5, 1.5])
async def test_server_that_answers_late_gets_one_connection(delay_s: float) -> None:
    async with busy(delay_s) as (passing, port):
        channel = open_channel(f"127.0.0.1:{port}")
        await asyncio.wait_for(channel.channel_ready(), DEADLINE_S)
        assert passing.connections == 1
        await channel.close()
