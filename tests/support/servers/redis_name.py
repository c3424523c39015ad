"""A name that stands for one Redis or another, as a load balancer's or a service's does."""

from __future__ import annotations

import asyncio

from services.common.base.tasks import TaskOwner


class RedisName:
    """An address that stands for one server or another; connections that are there stay where they are."""

    def __init__(self) -> None:
        self.port = 0
        self.url = ""

    async def __aenter__(self) -> RedisName:
        self._tasks = TaskOwner()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._tasks.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, to_there = await asyncio.open_connection("127.0.0.1", self.port)
        except ConnectionError:
            writer.close()  # the server has ended
            return
        self._tasks.spawn(self._pass(reader, to_there), "there")
        self._tasks.spawn(self._pass(there, writer), "back")

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # either side is gone
        finally:
            writer.close()
