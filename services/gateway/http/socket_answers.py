"""Turns the HTTP response to a message of a WebSocket into messages: events of a stream, or one error event."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.types import Message

from services.gateway.http.errors import error_object

_REPORTED = (b"retry-after", b"x-request-id", b"x-sluice-degraded")
_REPORTED_PREFIX = b"x-ratelimit-"


class SocketAnswer:
    """The response to one message.

    Args:
        send_text: sends one message.

    Attributes:
        status: HTTP status; 0 before the response starts.
    """

    def __init__(self, send_text: Callable[[str], Awaitable[None]]) -> None:
        self._send_text = send_text
        self.status = 0
        self._streams = False
        self._headers: dict[str, str] = {}
        self._body = b""

    async def send(self, message: Message) -> None:
        """The ASGI `send` of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message["headers"]
            self._streams = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
            )
            self._headers = {name.decode(): value.decode("latin-1") for name, value in headers if _reported(name)}
            return
        body = message.get("body", b"")
        if self._streams:
            for event in body.split(b"\n\n"):  # every chunk holds complete events
                await self._send_event(event)
            return
        self._body += body
        if not message.get("more_body"):
            await self._send_text(error_event(self.status, _error_of(self._body, self.status), self._headers))

    async def _send_event(self, event: bytes) -> None:
        data = event.find(b"data: ")
        if data >= 0 and not event.startswith(b":"):
            await self._send_text(event[data + 6 :].decode())


def error_event(status: int, error: dict[str, Any], headers: dict[str, str] | None = None) -> str:
    """Returns the event that reports an error.

    Args:
        headers: those of the HTTP response that clients need, such as retry-after.
    """
    event: dict[str, Any] = {"type": "error", "status": status, "error": error}
    if headers:
        event["headers"] = headers
    return orjson.dumps(event).decode()


def refusal(message: str, code: str) -> tuple[int, dict[str, Any]]:
    """Returns status and error of a message that is refused before it reaches the application."""
    return 400, error_object(message, 400, "", code)


def _error_of(body: bytes, status: int) -> dict[str, Any]:
    try:
        found: dict[str, Any] = orjson.loads(body)["error"]
        return {**found, "code": found["code"] or found["type"]}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return error_object("The request ended without a response.", status or 500, "", "server_error")


def _reported(name: bytes) -> bool:
    return name in _REPORTED or name.startswith(_REPORTED_PREFIX)
