"""Sending on an ASGI connection without a task switch per message.

An ASGI `send` is a coroutine, yet it finishes at once as long as the client keeps up. `InlineSender` runs it on the
spot; only when it really has to wait for the client, a task takes over and the caller is told to hold back.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SEND_KEY = "sluice.send"
ABORT_KEY = "sluice.abort"


class RawSendMiddleware:
    """Lets responses reach the server's own `send`, which every layer of the application wraps once more.

    What those layers do concerns the start of a response; a stream's later messages need not pass through them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SEND_KEY] = send
        try:
            await self._app(scope, receive, send)
        finally:
            scope.pop(SEND_KEY, None)  # the server's request knows its scope: they part here


def plain_send(scope: Scope, send: Send) -> Send:
    """The server's own send, to be used after the start of a response; `send` when it is not known."""
    plain: Send = scope.get(SEND_KEY, send)
    return plain


def abort(scope: Scope) -> None:
    """Cuts the connection and forgets what its client has not taken, where the server can do that."""
    cut: Callable[[], None] | None = scope.get(ABORT_KEY)
    if cut is not None:
        cut()


class InlineSender:
    """One client's connection.

    Args:
        send: the ASGI send.
        on_writable: called when a message that had to wait is out and the next one is welcome.
        on_broken: called when sending failed: the client is gone.
    """

    def __init__(self, send: Send, on_writable: Callable[[], None], on_broken: Callable[[], None]) -> None:
        self._send = send
        self._on_writable = on_writable
        self._on_broken = on_broken
        self._waiting: asyncio.Task[None] | None = None

    @property
    def blocked(self) -> bool:
        """The client has not taken the last message yet; hold the next one back."""
        return self._waiting is not None

    def send(self, message: Message) -> None:
        """Sends now; must not be called while `blocked`."""
        sending: Coroutine[Any, Any, None] = self._send(message)  # type: ignore[assignment]
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        except Exception:
            self._on_broken()
            return
        self._waiting = asyncio.get_running_loop().create_task(self._finish(sending, waits_for))

    async def close(self) -> None:
        """Gives up on a message that still waits."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _finish(self, sending: Coroutine[Any, Any, None], waits_for: Any) -> None:
        try:
            await _resume(sending, waits_for)
        except Exception:
            self._waiting = None
            self._on_broken()
            return
        self._waiting = None
        self._on_writable()


@types.coroutine
def _resume(coroutine: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Awaits a coroutine that was already run up to its first wait."""
    while True:
        try:
            answer = yield waits_for
        except BaseException as error:
            try:
                waits_for = coroutine.throw(error)
            except StopIteration:
                return
        else:
            try:
                waits_for = coroutine.send(answer)
            except StopIteration:
                return
