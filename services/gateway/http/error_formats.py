"""Middleware that converts errors to the format of the client's API.

Errors arise in many layers, in OpenAI's format; this outermost layer rewrites all of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HttpError(NamedTuple):
    """An error as a response reports it; `code` is None for errors without one."""

    status: int
    message: str
    code: str | None
    request_id: str


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How the errors of one API are written.

    Attributes:
        asked_by: returns whether a request uses the API.
        body: returns the JSON body of an error.
        request_id: name of a header with the request's id, besides `x-request-id`; empty: none.
    """

    asked_by: Callable[[Scope], bool]
    body: Callable[[HttpError], dict[str, Any]]
    request_id: bytes = b""


class ErrorFormats:
    """ASGI middleware; the request's id is that of the `Entrance`."""

    def __init__(self, app: ASGIApp, formats: Sequence[ErrorFormat]) -> None:
        self._app = app
        self._formats = formats

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http":
            for error_format in self._formats:
                if error_format.asked_by(scope):
                    send = _ErrorRewriter(send, error_format, scope["state"]["request_id"])
                    break
        return self._app(scope, receive, send)


class _ErrorRewriter:
    """Forwards a response; buffers the body of an error until it is complete."""

    def __init__(self, send: Send, error_format: ErrorFormat, request_id: str) -> None:
        self._send = send
        self._format = error_format
        self._request_id = request_id
        self._error: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._format.request_id:
                headers = [*message["headers"], (self._format.request_id, self._request_id.encode())]
                message = {**message, "headers": headers}
            if message["status"] >= 400:
                self._error = message
                return
        if self._error is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if not message.get("more_body"):
            await self._send_error(self._error)

    async def _send_error(self, start: Message) -> None:
        message, code = _error_of(self._body)
        body = orjson.dumps(self._format.body(HttpError(start["status"], message, code, self._request_id)))
        headers = [pair for pair in start["headers"] if pair[0] not in (b"content-length", b"content-type")]
        new_headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({**start, "headers": headers + new_headers})
        await self._send({"type": "http.response.body", "body": body})


def _error_of(body: bytes) -> tuple[str, str | None]:
    """Returns the message and the code of an error in OpenAI's format."""
    try:
        error = orjson.loads(body)["error"]
        return str(error["message"]), error.get("code")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return body.decode("utf-8", "replace") or "The request failed without a message.", None
