"""Admission of HTTP requests: the key they show, its limits, and the line."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from dataclasses import replace
from math import inf

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import SluiceError
from services.gateway import context
from services.gateway.admission.errors import OverLimit
from services.gateway.admission.gate import Gate
from services.gateway.admission.limits import LimitDecision
from services.gateway.admission.permit import Permit
from services.gateway.http.degradation import DEGRADED
from services.gateway.http.errors import error_response
from services.gateway.http.middleware import scopes as scoped
from services.gateway.http.middleware.rate_headers import rate_headers

BYTES_OF_COST_ONE = 16_384
WAIT_SHARE = 0.5
_BEARER = "bearer "


class AdmissionMiddleware:
    """Lets requests in before their bodies are read, so that those in line take no memory.

    Every request shows its key, which must have the scopes that its path and its headers need; those that ask for work
    (POST) count against limits and wait in line.

    Args:
        ignored: headers that name workers and have no effect here.
    """

    def __init__(self, app: ASGIApp, gate: Gate, ignored: frozenset[bytes] = frozenset()) -> None:
        self._app = app
        self._gate = gate
        self._ignored = ignored

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        needed = scoped.of_path(scope["path"])
        if needed is None:
            _enter(self._gate.identify(_shown(scope)))
            await self._app(scope, receive, send)
            return
        ears = _DisconnectMonitor(receive)
        try:
            key = self._gate.authenticate(_shown(scope))
            if (audit := context.current().audit) is not None:
                audit.key = key.id
            unqueued = self._gate.look_in(key)
            unqueued.require(needed, subject=scope["path"])
            if scope["method"] != "POST":
                _enter(unqueued)
                await self._app(scope, receive, send)
                return
            scoped.check_headers(unqueued, scope["headers"], self._ignored)
            patience_s = context.current().deadline.share(WAIT_SHARE, inf)
            permit = await self._gate.enter(key, _cost(scope), patience_s, ears.gone)
        except SluiceError as error:
            decision = error.decision if isinstance(error, OverLimit) else None
            await error_response(error)(scope, receive, self._marking(scope, send, decision, None))
            return
        _enter(permit)
        try:
            if permit.decision is None:
                await self._app(scope, ears.receive, send)
            else:
                await self._app(scope, ears.receive, self._marking(scope, send, None, permit))
        finally:
            self._gate.leave(permit)

    def _marking(self, scope: Scope, send: Send, decision: LimitDecision | None, permit: Permit | None) -> Send:
        """A send that says in the headers what is left of the limits."""

        def marking(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                said = permit.decision if permit is not None else decision
                if said is not None:
                    more = rate_headers(said, scope["path"])
                    if self._gate.degraded:
                        more.append((DEGRADED.encode(), self._gate.degraded.encode()))
                    message = {**message, "headers": [*message.get("headers", ()), *more]}
            return send(message)

        return marking


def _enter(permit: Permit) -> None:
    context.enter(replace(context.current(), permit=permit))


def _shown(scope: Scope) -> str | None:
    """The key of a request: the bearer token, else x-api-key; None when there is none or more than one."""
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
    """Of a request in its key's share of the line: long prompts are more work."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return max(int(value[:12]) / BYTES_OF_COST_ONE, 1.0)
    return 1.0


class _DisconnectMonitor:
    """Hears that a client went away while its request waits; what it says meanwhile is kept, one message at most."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()

    async def receive(self) -> Message:
        return self._kept.popleft() if self._kept else await self._receive()

    async def gone(self) -> None:
        while True:
            message = await self._receive()
            self._kept.append(message)
            if message["type"] == "http.disconnect":
                return
            if message.get("more_body"):  # the rest stays with the network until it is this request's turn
                await asyncio.get_running_loop().create_future()
