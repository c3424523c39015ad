"""Rig of the router's pipelines to Redis: calls of many requests share a round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast
from unittest.mock import AsyncMock

from services.common.base.errors import SluiceError
from services.common.redis.servers import Borrowed, RedisServers
from services.common.redis.target import parse
from services.router.state.store.redis_client import Connection, RedisClient
from services.router.state.store.redis_pipe import RedisPipe
from tests.support.shared_steps.rigs import ROWS, Fault, Outcome, rig


class _Pipe:
    """Answers every call with the number of its bytes."""

    lost = False

    def send(self, commands: Sequence[bytes], deadline: float) -> asyncio.Future[list[Any]]:
        replied: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        replied.set_result([len(command) for command in commands])
        return replied


class _Client(RedisClient):
    """Connects to nothing."""

    async def _connect(self, key: str, deadline: float) -> Connection:
        return Connection(Borrowed(("127.0.0.1", 1), 0, AsyncMock(), AsyncMock()), cast(RedisPipe, _Pipe()), 0)


@rig("router.redis_scripts")
async def run(fault: Fault) -> Outcome:
    """Runs one script for each row in one pipeline; a row at fault has an argument that cannot be packed."""
    client = _Client(RedisServers(parse("redis://127.0.0.1:1"), 1.0), 5.0, lanes=1)
    outcome = Outcome()

    async def one(row: int) -> None:
        argument: Any = object() if fault.due(row) else f"row-{row:02}"
        try:
            outcome.outputs[row] = await client.run("session", "{t}", argument)
        except SluiceError as error:
            outcome.errors[row] = error

    try:
        await asyncio.gather(*(one(row) for row in range(ROWS)))
        outcome.alive = isinstance(await client.run("session", "{t}", "again"), int)
    finally:
        await client.close()
    return outcome
