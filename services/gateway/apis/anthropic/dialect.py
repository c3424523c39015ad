"""Middleware for Anthropic's conventions: version header, the name of the request id's header, and the error format.

Errors arise in many layers; this outermost layer rewrites all of them to Anthropic's format.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import SluiceError

VERSIONS = ("2023-06-01", "2026-10-21")
"""Accepted API versions. `temperature`, `top_p` and `top_k`, which the second one removed, work with both."""
REQUEST_ID = b"request-id"
THREADS_UNSUPPORTED = "thread_unsupported_request"
"""Code after which Anthropic's SDKs repeat a request without `thread`."""
_PATHS = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_type(status: int) -> str:
    """Returns Anthropic's error type for an HTTP status."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error_body(status: int, message: str, request_id: str, code: str | None = None) -> dict[str, Any]:
    """Returns `{"type": "error", "error": {"type", "message"}, "request_id"}`; some codes add details."""
    error: dict[str, Any] = {"type": error_type(status), "message": message}
    if code == THREADS_UNSUPPORTED:
        error["details"] = {"error_code": code, "unsupported": ["thread"]}
    return {"type": "error", "error": error, "request_id": request_id}


def error_event_body(error: SluiceError, request_id: str) -> dict[str, Any]:
    """Returns the error body for an error in the middle of a stream."""
    return error_body(error.http_status, error.message, request_id)


def speaks_anthropic(scope: Scope) -> bool:
    """Returns whether a request uses Anthropic's API, by its path or by the header that all Anthropic clients send."""
    path: str = scope["path"]
    if path == _PATHS or path.startswith(_PATHS + "/"):
        return True
    return path.startswith("/v1/models") and any(name == b"anthropic-version" for name, _ in scope["headers"])


class AnthropicDialect:
    """ASGI middleware that adds `request-id` and Anthropic's error format to responses of Anthropic's API.

    The id is that of the middleware `RequestIds`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not speaks_anthropic(scope):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _ErrorRewriter(send, scope["state"]["request_id"]))


class _ErrorRewriter:
    """Forwards a response; buffers the body of an error until it is complete."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self._error: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"], (REQUEST_ID, self._request_id.encode())]
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
        body = orjson.dumps(error_body(start["status"], message, self._request_id, code))
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
