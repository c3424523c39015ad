"""Gives every request an id, which its response returns."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = b"x-request-id"
_VALID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class RequestIds:
    """Sets `request_id` in the state of a request and `x-request-id` in its response.

    The id is that of the client, unless it sends none or one that is not 1 to 128 letters, digits, dots, colons, dashes
    and underscores.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given(scope) or f"req_{secrets.token_hex(12)}".encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        def identified_send(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (REQUEST_ID, request_id)]}
            return send(message)

        await self._app(scope, receive, identified_send)


def _given(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == REQUEST_ID:
            return value if _VALID.fullmatch(value) else b""
    return b""
