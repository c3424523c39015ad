"""Admission of HTTP requests: API key, scopes, limits and queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from math import inf
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.base.errors import SluiceError
from services.gateway.admission.errors import OverLimit
from services.gateway.admission.gate import Gate
from services.gateway.admission.limits import LimitDecision
from services.gateway.admission.permit import Permit
from services.gateway.core import context
from services.gateway.http.degradation import DEGRADED
from services.gateway.http.errors import error_response
from services.gateway.http.middleware import scopes as scoped
from services.gateway.http.middleware.rate_headers import rate_headers

BYTES_PER_COST = 16_384
QUEUE_SHARE = 0.5
"""Maximum share of a request's remaining time that it may spend in the queue."""
_BEARER = "bearer "


class _Decided(Protocol):
    @property
    def decision(self) -> LimitDecision | None: ...


class AdmissionMiddleware:
    """Admits requests before their bodies are read, so that queued requests take no memory.

    Every request must have a key with the scopes that its path and headers require; those that start work (POST) also
    count against the limits of the key and may be queued.

    Args:
        ignored: headers that name workers but have no effect on this gateway.
    """

    def __init__(self, app: ASGIApp, gate: Gate, ignored: frozenset[bytes] = frozenset()) -> None:
        self._app = app
        self._gate = gate
        self._ignored = ignored

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        credential = credential_of(scope)
        required = scoped.of_path(scope["path"])
        if required is None:
            _enter(self._gate.identify(credential))
            await self._app(scope, receive, send)
            return
        monitor = _DisconnectMonitor(receive)
        try:
            key = self._gate.authenticate(credential)
            if (audit := context.current().audit) is not None:
                audit.key = key.id
            permit = self._gate.uncounted(key)
            permit.require(required, subject=scope["path"])
            # The messages of a WebSocket are admitted as requests of their own.
            if scope["type"] == "websocket" or scope["method"] != "POST":
                _enter(permit)
                await self._app(scope, receive, send)
                return
            scoped.check_headers(permit, scope["headers"], self._ignored)
            timeout_s = context.current().deadline.share(QUEUE_SHARE, inf)
            permit = await self._gate.enter(key, _cost(scope), timeout_s, monitor.disconnected)
        except SluiceError as error:
            error_send = self._with_rate_headers(scope, send, error) if isinstance(error, OverLimit) else send
            await error_response(error)(scope, receive, error_send)
            return
        _enter(permit)
        try:
            limited = permit.decision is not None
            await self._app(scope, monitor.receive, self._with_rate_headers(scope, send, permit) if limited else send)
        finally:
            self._gate.leave(permit)

    def _with_rate_headers(self, scope: Scope, send: Send, source: _Decided) -> Send:
        """Returns a `send` that adds the state of the limits to the headers."""

        def send_with_headers(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start" and source.decision is not None:
                headers = rate_headers(source.decision, scope["path"])
                if self._gate.degraded:
                    headers.append((DEGRADED.encode(), self._gate.degraded.encode()))
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            return send(message)

        return send_with_headers


def _enter(permit: Permit) -> None:
    context.enter(context.current()._replace(permit=permit))


def credential_of(scope: Scope) -> str | None:
    """Returns the credential of a request: its bearer token, else x-api-key; None without one or with several.

    The only place that reads the headers; everything else identifies the client by the key in the request's permit.
    """
    bearers, keys = [], []
    for name, value in scope["headers"]:
        if name == b"authorization":
            bearers.append(value)
        elif name == b"x-api-key":
            keys.append(value)
    if len(bearers) > 1 or len(keys) > 1:
        return None
    if bearers:
        text: str = bearers[0].decode("latin-1").strip()
        return text[len(_BEARER) :].strip() if text[: len(_BEARER)].lower() == _BEARER else None
    return keys[0].decode("latin-1").strip() if keys else None


def _cost(scope: Scope) -> float:
    """Returns the share of a key's turns in the queue that a request uses, by the length of its body."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return max(int(value[:12]) / BYTES_PER_COST, 1.0)
    return 1.0


class _DisconnectMonitor:
    """Detects the disconnect of a client whose request is queued, and retains at most one message of its body."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: deque[Message] = deque()

    async def receive(self) -> Message:
        return self._messages.popleft() if self._messages else await self._receive()

    async def disconnected(self) -> None:
        while True:
            message = await self._receive()
            self._messages.append(message)
            if message["type"] == "http.disconnect":
                return
            if message.get("more_body"):  # the rest stays in the network until the request is admitted
                await asyncio.get_running_loop().create_future()
