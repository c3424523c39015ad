"""The entrance of the HTTP application: what every request passes first, inside of nothing but the server."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from os import urandom

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.base.errors import internal
from services.gateway.http.errors import error_response
from services.gateway.http.inline_sender import SEND_KEY

ENTRANCE_KEY = "sluice.entrance"
"""Where a WebSocket finds the entrance in its scope: each of its messages enters as a request of its own."""
REQUEST_ID = b"x-request-id"
_VALID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Entrance:
    """Gives every request an id, puts the server's `send` into its scope, and responds when it fails unexpectedly.

    The id is `request_id` in the request's state and `x-request-id` in its response: that of the client, unless it
    sends none or one that is not 1 to 128 letters, digits, dots, colons, dashes and underscores. Streams send their
    later messages with the server's own `send`, because what middleware adds to it only affects the start.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            scope[ENTRANCE_KEY] = self
            await self._app(scope, receive, send)
            return
        scope[SEND_KEY] = send
        request_id = _given(scope) or f"req_{urandom(12).hex()}".encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        started = False

        def identified_send(message: Message) -> Awaitable[None]:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message["headers"], (REQUEST_ID, request_id)]}
            return send(message)

        try:
            await self._app(scope, receive, identified_send)
        except Exception:
            if not started:
                failure = internal("Unexpected failure in the gateway; see its log for details.")
                await error_response(failure)(scope, receive, identified_send)
            raise  # the server logs it
        finally:
            scope.pop(SEND_KEY, None)  # Break the reference cycle: the server's request references its scope.


def _given(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == REQUEST_ID:
            return value if _VALID.fullmatch(value) else b""
    return b""
