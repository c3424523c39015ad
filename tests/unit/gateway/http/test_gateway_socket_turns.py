"""Connections over WebSocket: their limits, their end, and what they pass on to the application."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from services.common.base.budgets import TenantPool
from services.common.net.http.connection import ABORT_KEY
from services.gateway.http.entrance import ENTRANCE_KEY
from services.gateway.http.socket_turns import SocketLimits, SocketTurns
from tests.support.waiting import until

LONG = SocketLimits(60, 60, 60, 60)


def pool(total: int, per_tenant: int) -> TenantPool:
    return TenantPool("sockets", total, "", per_tenant, "")


class Session:
    closed = False

    def close(self) -> None:
        self.closed = True


class Client:
    """The other end of a connection, and the application behind it.

    Attributes:
        requests: scope and body of each request that reached the application.
        ends: ends a response that waits.
    """

    def __init__(
        self, limits: SocketLimits = LONG, answer: str = "stream", open_sockets: TenantPool | None = None
    ) -> None:
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        self.requests: list[tuple[Scope, bytes]] = []
        self.ends = asyncio.Event()
        self.session = Session()
        self.blocked = False
        self.aborted = False
        self._answer = answer
        self.inbox.put_nowait({"type": "websocket.connect"})
        scope: Scope = {
            "type": "websocket",
            "asgi": {},
            "server": None,
            "client": None,
            "root_path": "",
            "path": "/v1/responses",
            "raw_path": b"/v1/responses",
            "scheme": "ws",
            "headers": [
                (b"host", b"a"),
                (b"authorization", b"Bearer k"),
                (b"upgrade", b"websocket"),
                (b"sec-websocket-key", b"x"),
                (b"x-request-id", b"mine"),
            ],
            ENTRANCE_KEY: self._app,
            ABORT_KEY: self._abort,
        }
        turns = SocketTurns(lambda: self.session, limits, open_sockets or pool(10, 10))
        self.running = asyncio.create_task(turns(scope, self.inbox.get, self._send))

    def part(self, data: bytes, more: bool = False, text: bool = True) -> None:
        self.inbox.put_nowait({"type": "websocket.receive", "bytes": data, "text": text, "more_body": more})

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(message["text"]) for message in self.sent if message["type"] == "websocket.send"]

    def codes(self) -> list[int]:
        return [message["code"] for message in self.sent if message["type"] == "websocket.close"]

    def _abort(self) -> None:
        self.aborted = True

    async def _send(self, message: Message) -> None:
        if self.blocked:
            await asyncio.Event().wait()
        self.sent.append(message)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._answer == "early":
            await self._respond(send, 429, b'{"error": {"message": "m", "type": "t", "code": null}}')
            return
        if self._answer == "raises":
            raise RuntimeError
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.requests.append((scope, body))
        if self._answer == "wait":
            waiting = asyncio.ensure_future(receive())
            await asyncio.wait((waiting, asyncio.create_task(self.ends.wait())), return_when="FIRST_COMPLETED")
            waiting.cancel()
        await self._respond(send, 200, b'event: a\ndata: {"type":"a"}\n\n: c\n\nevent: b\ndata: {"type":"b"}\n\n')

    async def _respond(self, send: Send, status: int, body: bytes) -> None:
        kind = b"text/event-stream" if status == 200 else b"application/json"
        headers = [(b"content-type", kind), (b"x-ratelimit-limit", b"1"), (b"set-cookie", b"no")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def test_messages_are_requests_whose_events_are_messages() -> None:
    client = Client()
    client.part(b"one")
    client.part(b"tw", more=True)
    client.part(b"o")
    client.inbox.put_nowait({"type": "websocket.disconnect", "code": 1000})
    await client.running
    assert [body for _, body in client.requests] == [b"one", b"two"]
    assert [event["type"] for event in client.events()] == ["a", "b", "a", "b"]
    first, second = (dict(scope["headers"]) for scope, _ in client.requests)
    assert first == {b"host": b"a", b"authorization": b"Bearer k", b"content-length": b"3"}
    assert second[b"transfer-encoding"] == b"chunked"
    assert client.session.closed


async def test_an_error_response_is_an_error_event_with_the_headers_that_clients_need() -> None:
    client = Client(answer="early")
    client.part(b"on", more=True)
    client.part(b"e")
    await until(lambda: bool(client.events()))
    client.inbox.put_nowait({"type": "websocket.disconnect", "code": 1000})
    await client.running
    error = {"message": "m", "type": "t", "code": "t"}
    event = {"type": "error", "status": 429, "error": error, "headers": {"x-ratelimit-limit": "1"}}
    assert client.events() == [event]


async def test_a_failing_application_aborts_the_connection() -> None:
    client = Client(answer="raises")
    client.part(b"one")
    await client.running
    assert client.aborted
    assert client.session.closed


async def test_an_idle_connection_is_closed() -> None:
    client = Client(SocketLimits(0.01, 60, 60, 60))
    await client.running
    assert client.codes() == [1001]


async def test_a_connection_at_the_end_of_its_lifetime_is_closed_with_its_error() -> None:
    client = Client(SocketLimits(60, 0.01, 60, 60))
    await client.running
    assert client.events()[0]["error"]["code"] == "websocket_connection_limit_reached"
    assert client.codes() == [1001]


async def test_a_client_that_does_not_read_is_disconnected() -> None:
    client = Client(SocketLimits(60, 60, 60, 0.01))
    await until(lambda: bool(client.sent))
    client.blocked = True
    client.part(b"\0", text=False)
    await client.running
    assert client.aborted


async def test_a_message_whose_rest_does_not_arrive_closes_the_connection() -> None:
    client = Client(SocketLimits(60, 60, 0.01, 60), answer="early")
    client.part(b"on", more=True)
    await client.running
    assert client.codes() == [1009]


async def test_a_draining_connection_ends_after_its_response() -> None:
    client = Client(answer="wait")
    client.part(b"one")
    await until(lambda: bool(client.requests))
    client.inbox.put_nowait({"type": "websocket.drain"})
    await until(client.inbox.empty)
    assert client.codes() == []
    client.ends.set()
    await client.running
    assert [event["type"] for event in client.events()] == ["a", "b"]
    assert client.codes() == [1012]


async def test_an_idle_connection_that_drains_is_closed_at_once() -> None:
    client = Client()
    client.inbox.put_nowait({"type": "websocket.drain"})
    await client.running
    assert client.codes() == [1012]


@pytest.mark.parametrize("more", [False, True])
async def test_a_second_message_is_refused_once_and_discarded(more: bool) -> None:
    client = Client(answer="wait")
    client.part(b"one")
    await until(lambda: bool(client.requests))
    client.part(b"tw", more=more)
    if more:
        client.part(b"o")
    await until(client.inbox.empty)
    client.ends.set()
    await until(lambda: len(client.events()) == 3)
    client.part(b"three")
    await until(lambda: len(client.requests) == 2)
    client.inbox.put_nowait({"type": "websocket.disconnect", "code": 1000})
    await client.running
    assert client.events()[0]["error"]["code"] == "response_in_progress"
    assert [body for _, body in client.requests] == [b"one", b"three"]


@pytest.mark.parametrize(
    ("open_sockets", "status", "code"),
    [(pool(1, 2), 503, "budget_exceeded"), (pool(2, 1), 429, "rate_limit_exceeded")],
    ids=["all", "tenant"],
)
async def test_connection_beyond_the_limit_is_refused_until_another_one_ends(
    open_sockets: TenantPool, status: int, code: str
) -> None:
    first = Client(open_sockets=open_sockets)
    await until(lambda: bool(first.sent))
    second = Client(open_sockets=open_sockets)
    await second.running
    start, body = second.sent
    assert (start["type"], start["status"]) == ("websocket.http.response.start", status)
    assert json.loads(body["body"])["error"]["code"] == code
    assert (b"retry-after", b"1") in start["headers"]
    first.inbox.put_nowait({"type": "websocket.disconnect"})
    await first.running
    third = Client(open_sockets=open_sockets)
    await until(lambda: bool(third.sent))
    assert third.sent[0]["type"] == "websocket.accept"
    third.running.cancel()


@pytest.mark.parametrize("text", [True, False])
async def test_connection_with_too_many_refused_messages_is_closed(text: bool) -> None:
    client = Client(answer="wait")
    client.part(b"{}")
    await until(lambda: bool(client.requests))
    for _ in range(50):
        client.part(b"{}", text=text)
    await client.running
    assert client.codes() == [1008]
    assert len(client.events()) == 16
