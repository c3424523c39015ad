"""Rigs of the steps that write to many HTTP clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError
from services.gateway.http.keepalive import KeepaliveMonitor
from services.gateway.http.sse import EventStream
from services.gateway.http.write_scheduler import WriteScheduler
from services.gateway.operations.operation import EventListener
from services.gateway.operations.output import COMMENT
from tests.support.shared_steps.rigs import ROWS, Fault, Outcome, rig


class _Source:
    failure = None

    def __init__(self, fault: Fault, row: int) -> None:
        self._fault, self._row = fault, row
        self._text = ""
        self.over = False

    def add(self, text: str) -> None:
        self._text += text

    @property
    def unsent(self) -> int:
        return len(self._text)

    def attach(self, listener: EventListener) -> None:
        pass

    def take(self) -> bytes:
        self._fault.at(self._row)
        text, self._text = self._text, ""
        return text.encode()

    def silence(self) -> bytes:
        return COMMENT

    def cancel(self) -> None:
        pass


class _Client:
    """One client's connection: what it received, and whether it was cut."""

    def __init__(self, fault: Fault, row: int, scheduler: WriteScheduler) -> None:
        self.source = _Source(fault, row)
        self.stream = EventStream(self.source, scheduler, 1 << 20)
        self.received = b""
        self.cut = False
        self.ended = False
        self._fault, self._row = fault, row

    async def serve(self) -> None:
        scope = {"type": "http", "sluice.abort": self._abort}
        await self.stream(scope, self._receive, self._send)

    def _abort(self) -> None:
        self.cut = True

    async def _receive(self) -> Any:
        await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self._fault.at(self._row)
            self.received += message["body"]
            self.ended = not message["more_body"]


async def _serve(fault: Fault, scheduler: WriteScheduler, tick: Callable[[], Awaitable[None]]) -> Outcome:
    """Sends three events to each client, with `tick` before each, and the end."""
    clients = [_Client(fault, row, scheduler) for row in range(ROWS)]
    tasks = [asyncio.ensure_future(client.serve()) for client in clients]
    for number in range(4):
        for row, client in enumerate(clients):
            client.source.add(f"data: {row}.{number}\n\n")
            client.source.over = number == 3
            client.stream.notify()
        await tick()
    ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    outcome = Outcome({row: client.received for row, client in enumerate(clients)})
    for row, (client, result) in enumerate(zip(clients, ended, strict=True)):
        if client.cut or isinstance(result, Exception) or not client.ended:
            outcome.errors[row] = SluiceError(ErrorKind.DISCONNECTED, "The client was disconnected.")
    return outcome


@rig("gateway.writes")
async def writes(fault: Fault) -> Outcome:
    async def tick() -> None:
        await asyncio.sleep(0.01)

    return await _serve(fault, WriteScheduler(), tick)


@rig("gateway.keep_alive")
async def keep_alive(fault: Fault) -> Outcome:
    monitor = KeepaliveMonitor(comment_every_s=1e6, write_timeout_s=1e6)

    async def tick() -> None:
        await asyncio.sleep(0.01)
        for _ in range(2):  # the first check finds each stream busy, the second one sends comments
            monitor._comments_sent_at = -1e9
            if monitor._next is not None:
                monitor._next.cancel()
            monitor._check()

    outcome = await _serve(fault, WriteScheduler(monitor), tick)
    outcome.outputs = {row: received.replace(b": keep-alive\n\n", b"") for row, received in outcome.outputs.items()}
    return outcome
