"""The ids of requests."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from services.gateway.http.entrance import Entrance


async def answered(*given: bytes) -> tuple[str, list[bytes]]:
    """The id in the request's state, and the values of the response's header."""
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"x"})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "headers": [(b"x-request-id", value) for value in given]}
    await Entrance(app)(scope, receive, send)
    assert sent[1] == {"type": "http.response.body", "body": b"x"}
    return scope["state"]["request_id"], [value for name, value in sent[0]["headers"] if name == b"x-request-id"]


async def test_request_id_of_the_client_is_returned() -> None:
    assert await answered(b"Trace-1.2:a_b") == ("Trace-1.2:a_b", [b"Trace-1.2:a_b"])


@pytest.mark.parametrize("given", [(), (b"",), (b"a b",), (b"x" * 129,), ("ä".encode(),)])
async def test_request_id_that_is_missing_or_malformed_is_made(given: tuple[bytes, ...]) -> None:
    request_id, returned = await answered(*given)
    assert request_id.startswith("req_")
    assert returned == [request_id.encode()]
