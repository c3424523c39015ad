"""Serves a path over WebSocket: every message is a request of its own, and the events of its stream are messages.

Each message passes through the application as a POST of the same path, with the headers of the handshake: keys, scopes,
limits, queue, deadlines, audit, metrics and errors are those of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from services.common.base.budgets import TenantPool
from services.common.base.errors import SluiceError
from services.common.net.http.connection import ABORT_KEY
from services.gateway.core import context
from services.gateway.http.connection import CONNECTION_KEY
from services.gateway.http.entrance import ENTRANCE_KEY
from services.gateway.http.errors import error_response
from services.gateway.http.inline_sender import abort
from services.gateway.http.socket_answers import SocketAnswer, error_event, refusal
from services.gateway.http.socket_frames import POLICY_VIOLATION, Allowance
from services.gateway.http.socket_protocol import DRAIN, FRAME_BUDGET, PART

log = logging.getLogger(__name__)

_NOT_PASSED_ON = (
    b"connection", b"upgrade", b"content-length", b"content-type", b"content-encoding", b"transfer-encoding",
    b"x-request-id",
)  # fmt: skip
MAX_SOCKETS = 4096
"""Open WebSockets; further ones are rejected with 503."""
MAX_IDLE_S = 900.0
"""Seconds without a message of a WebSocket; then it is closed."""
MAX_LIFETIME_S = 3600.0
"""Seconds of age of a WebSocket; then it is closed, once no response is in progress."""
GOING_AWAY, TOO_LARGE, RESTARTS = 1001, 1009, 1012
LIMIT_REACHED = "websocket_connection_limit_reached"
MAX_REFUSED_BURST = 16
"""Messages of one WebSocket that are refused before they become requests, at once; with more it is closed."""
MAX_REFUSED_PER_S = 4.0
"""Refused messages of one WebSocket a second after those at once; with more it is closed."""


class SocketSession(Protocol):
    """What a connection remembers between its requests."""

    def close(self) -> None:
        """Forgets everything."""


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """Bounds of a connection.

    Attributes:
        idle_s: longest wait for the next message, seconds.
        lifetime_s: longest lifetime, seconds; the request in progress then may end.
        message_s: longest time for the rest of a message to arrive, seconds.
        write_s: longest time that a client may read nothing, seconds.
    """

    idle_s: float
    lifetime_s: float
    message_s: float
    write_s: float


class SocketTurns:
    """ASGI application of a WebSocket route.

    Args:
        sessions: makes the session of a connection.
        open_sockets: bounds the open connections of each tenant, and of all.
    """

    def __init__(self, sessions: Callable[[], SocketSession], limits: SocketLimits, open_sockets: TenantPool) -> None:
        self._sessions = sessions
        self._limits = limits
        self._open_sockets = open_sockets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (await receive())["type"] != "websocket.connect":
            return
        tenant = context.current().permit.owner
        try:
            self._open_sockets.take(tenant, 1, "The open WebSockets")
        except SluiceError as error:
            await error_response(error)(scope, receive, send)
            return
        session = self._sessions()
        try:
            await send({"type": "websocket.accept"})
            await _TurnsOfConnection(scope, receive, send, session, self._limits).run()
        finally:
            session.close()
            self._open_sockets.give_back(tenant, 1)


def open_sockets(max_connections: int, tenants: bool) -> TenantPool:
    """Returns the bound on open WebSockets, which leaves a quarter of the connections to other requests.

    Args:
        tenants: whether clients have API keys; a tenant then has a quarter of it.
    """
    total = max_sockets(max_connections)
    per_tenant = total // 4 if tenants else total
    return TenantPool("sockets", total, "--max-connections", per_tenant, "--max-connections")


def max_sockets(max_connections: int) -> int:
    """Returns the maximum number of open WebSockets."""
    return min(MAX_SOCKETS, max_connections * 3 // 4)


class _TurnsOfConnection:
    """The messages of one connection, answered one after the other."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, session: SocketSession, limits: SocketLimits
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._session = session
        self._limits = limits
        self._headers = [pair for pair in scope["headers"] if _passed_on(pair[0])]
        self._first: Message | None = None  # first part of the message, until it is read
        self._more = False  # whether more parts of a message follow
        self._second = False  # whether more parts of a refused message follow
        self._gone = self._draining = False
        self._cut = False  # whether the connection was closed during a response, the rest of which is discarded
        self._refused = Allowance(MAX_REFUSED_BURST, MAX_REFUSED_PER_S, asyncio.get_running_loop().time)

    async def run(self) -> None:
        """Answers messages until the connection ends."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._limits.lifetime_s
        while not self._gone:
            if self._draining:
                return await self._close(RESTARTS, "the server restarts; connect again")
            remaining_s = ends_at - loop.time()
            try:
                async with asyncio.timeout(min(self._limits.idle_s, remaining_s)):
                    part = await self._next()
            except TimeoutError:
                if remaining_s <= self._limits.idle_s:
                    return await self._end_lifetime()
                return await self._close(GOING_AWAY, f"no message within {self._limits.idle_s:g} s")
            if part is not None and not await self._answer(part):
                return None
        return None

    async def _next(self) -> Message | None:
        """Returns the next part of a message; None if the connection ends or drains instead."""
        message = await self._receive()
        if message["type"] == PART:
            self._more = message["more_body"]
            return message
        self._draining = self._draining or message["type"] == DRAIN
        self._gone = message["type"] != DRAIN
        return None

    async def _answer(self, part: Message) -> bool:
        """Answers the message that begins with a part; returns False if the connection was closed."""
        if part["text"]:
            status = await self._request(part)
        else:
            status = 400
            await self._refuse("Binary messages are not supported; send JSON as text.", "binary_message")
        if self._more and (status == 413 or not await self._skipped()):
            await self._close(TOO_LARGE, "the message is too large")
            return False
        return True

    async def _skipped(self) -> bool:
        """Discards the rest of a message that has been answered; returns False if it takes too long."""
        try:
            async with asyncio.timeout(self._limits.message_s):
                while self._more and not self._gone:
                    await self._next()
        except TimeoutError:
            return False
        return True

    async def _request(self, part: Message) -> int:
        """Sends a message through the application; returns the status of its response."""
        self._first = part
        length = str(len(part["bytes"])).encode()
        framing = (b"transfer-encoding", b"chunked") if self._more else (b"content-length", length)
        scope: Scope = {
            "type": "http",
            **{name: self._scope[name] for name in ("asgi", "server", "client", "root_path", "path", "raw_path")},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "https" if self._scope["scheme"] == "wss" else "http",
            "query_string": b"",
            "headers": [*self._headers, framing],
            "state": {},
            "extensions": {},
            ABORT_KEY: self._scope.get(ABORT_KEY),
            CONNECTION_KEY: self._session,
        }
        answer = SocketAnswer(self._send_text)
        try:
            await self._scope[ENTRANCE_KEY](scope, self._receive_body, answer.send)
        except OSError:  # the client disconnected while its answer was being sent
            self._gone = True
        except Exception:
            log.exception("failed to answer a WebSocket message")
            abort(self._scope)
            self._gone = True
        self._first, self._second = None, False
        return answer.status

    async def _receive_body(self) -> Message:
        """The `receive` of a request: the parts of its message, then the disconnect."""
        if (first := self._first) is not None:
            self._first = None
            return {"type": "http.request", "body": first["bytes"], "more_body": self._more}
        in_body = self._more
        while not self._gone:
            part = await self._next()
            if part is not None and in_body:
                return {"type": "http.request", "body": part["bytes"], "more_body": self._more}
            if part is not None:
                await self._refuse_second(part)
        return {"type": "http.disconnect"}

    async def _refuse_second(self, part: Message) -> None:
        """Refuses a message that arrives while another one is being answered, at its first part."""
        if not self._second:
            message = "A response is in progress on this connection; wait for its end, or open another connection."
            await self._refuse(message, "response_in_progress")
        self._second = part["more_body"]

    async def _refuse(self, message: str, code: str) -> None:
        """Refuses a message that does not become a request; closes the connection after too many of them."""
        if self._refused.take(1):
            await self._tell(refusal(message, code))
            return
        FRAME_BUDGET.count()
        await self._close(POLICY_VIOLATION, f"more than {MAX_REFUSED_PER_S:g} refused messages a second")
        self._gone = self._cut = True

    async def _end_lifetime(self) -> None:
        message = f"The connection has reached its limit of {self._limits.lifetime_s:g} s; open a new one."
        await self._tell(refusal(message, LIMIT_REACHED))
        await self._close(GOING_AWAY, "lifetime")

    async def _tell(self, found: tuple[int, dict[str, Any]]) -> None:
        await self._in_time({"type": "websocket.send", "text": error_event(*found)})

    async def _close(self, code: int, reason: str) -> None:
        await self._in_time({"type": "websocket.close", "code": code, "reason": reason})

    async def _in_time(self, message: Message) -> None:
        """Sends a message; aborts the connection of a client that does not read it in time."""
        try:
            async with asyncio.timeout(self._limits.write_s):
                await self._send(message)
        except TimeoutError:
            abort(self._scope)
            self._gone = True

    async def _send_text(self, text: str) -> None:
        if not self._cut:
            await self._send({"type": "websocket.send", "text": text})


def _passed_on(name: bytes) -> bool:
    return name not in _NOT_PASSED_ON and not name.startswith(b"sec-websocket-")
