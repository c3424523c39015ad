"""Links that are closed in the moment in which they connect."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.gateway.backends.rpc.link import Link


class Connecting:
    """A channel that becomes ready when it is told to."""

    def __init__(self) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def channel_ready(self) -> None:
        await self.ready


class ClosedLink(Link[Any, Any, Any]):
    """A link whose channel is closed when the session opens, as that of a worker that has just been replaced."""

    opened = 0

    def _open_call(self) -> grpc.aio.StreamStreamCall[Any, Any]:
        self.opened += 1
        raise grpc.aio.UsageError("Channel is closed.")

    def _drain(self) -> None:
        return None

    def _on_message(self, message: Any) -> bool:
        return False

    def _reset(self) -> None: ...


@pytest.mark.parametrize("turns", range(5))
async def test_link_cancelled_while_its_channel_becomes_ready_ends(turns: int) -> None:
    channel = Connecting()
    link = ClosedLink("worker w", cast(grpc.aio.Channel, channel), 5.0, lambda error: None)
    running = asyncio.create_task(link.run())
    await asyncio.sleep(0)
    channel.ready.set_result(None)
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running], timeout=5)
    assert running.cancelled()


async def test_link_whose_channel_was_closed_reports_its_loss_and_tries_again() -> None:
    channel, lost = Connecting(), list[SluiceError]()
    channel.ready.set_result(None)
    link = ClosedLink("worker w", cast(grpc.aio.Channel, channel), 5.0, lost.append)
    running = asyncio.create_task(link.run())
    await asyncio.sleep(0.5)
    running.cancel()
    await asyncio.wait([running], timeout=5)
    assert running.cancelled()
    assert link.opened > 1
    assert {error.kind for error in lost} == {ErrorKind.DISCONNECTED}
