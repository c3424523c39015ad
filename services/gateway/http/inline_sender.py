"""Sends ASGI messages without a task switch for each.

The coroutine of an ASGI `send` completes without suspending as long as the client reads fast enough. `InlineSender`
runs it in place; only if it suspends does a task complete it, and the sender reports that it is blocked.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from starlette.types import Message, Scope, Send

from services.common.net.http.connection import ABORT_KEY

SEND_KEY = "sluice.send"
"""Where streams find the server's `send` in their scope."""


def raw_send(scope: Scope, send: Send) -> Send:
    """Returns the server's `send`, for use after the start of a response; the given one if the scope has none."""
    raw: Send = scope.get(SEND_KEY, send)
    return raw


def abort(scope: Scope) -> None:
    """Aborts the connection and discards pending data, if the server supports it."""
    abort_connection: Callable[[], None] | None = scope.get(ABORT_KEY)
    if abort_connection is not None:
        abort_connection()


class InlineSender:
    """Sends messages to one client.

    Args:
        send: the ASGI send.
        write: writes a chunk in place, see `chunk_writer`; None: chunks are sent with `send`.
        on_writable: called when a blocked message has been sent and the next one may follow.
        on_broken: called when sending failed because the client disconnected.
    """

    def __init__(
        self,
        send: Send,
        write: Callable[[bytes], bool] | None,
        on_writable: Callable[[], None],
        on_broken: Callable[[], None],
    ) -> None:
        self._send = send
        self._write = write
        self._on_writable = on_writable
        self._on_broken = on_broken
        self._waiting: asyncio.Task[None] | None = None

    @property
    def blocked(self) -> bool:
        """Whether the last message is still being sent."""
        return self._waiting is not None

    def send(self, message: Message) -> None:
        """Sends a message; must not be called while `blocked`."""
        sending: Coroutine[Any, Any, None] = self._send(message)  # type: ignore[assignment]
        try:
            awaited = sending.send(None)
        except StopIteration:
            return
        except Exception:
            self._on_broken()
            return
        self._waiting = asyncio.get_running_loop().create_task(self._finish(sending, awaited))

    def send_chunk(self, data: bytes) -> None:
        """Sends a part of the body, which is not empty and not the last; must not be called while `blocked`."""
        if self._write is None or not self._write(data):
            self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        """Cancels a message that is still being sent."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _finish(self, sending: Coroutine[Any, Any, None], awaited: Any) -> None:
        try:
            await _resume(sending, awaited)
        except Exception:
            self._waiting = None
            self._on_broken()
            return
        self._waiting = None
        self._on_writable()


@types.coroutine
def _resume(coroutine: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Completes a coroutine that has already run up to its first suspension."""
    while True:
        try:
            result = yield awaited
        except BaseException as error:
            try:
                awaited = coroutine.throw(error)
            except StopIteration:
                return
        else:
            try:
                awaited = coroutine.send(result)
            except StopIteration:
                return
