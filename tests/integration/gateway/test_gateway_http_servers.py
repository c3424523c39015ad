"""Smuggled, oversized, unreadable, compressed and slow requests to the HTTP server: bounded and closed, and the
next client is served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from services.common.base.errors import SluiceError
from services.common.net.http.bounds import Bounds
from services.gateway.http.body import read_json
from services.gateway.http.errors import error_response, plain_error_response
from services.gateway.http.server import HttpServer
from tests.support.clients.raw_http import MALFORMED, UNKNOWN_METHOD, WAIT_S, answer, everything, post

HEADER_BYTES = 16 << 10
BOUNDS = Bounds(header_bytes=HEADER_BYTES, header_timeout_s=1.0, body_timeout_s=1.0)
SECOND = b"POST /smuggled HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


class Echo:
    """Reads JSON and says it again."""

    def __init__(self) -> None:
        self.served: list[str] = []
        self.names: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.served.append(scope["path"])
        try:
            body = await read_json(Request(scope, receive), 1 << 16, 1.0)
            self.names = [name for name, _ in scope["headers"]]
            response = plain_error_response(json.dumps(body), 200)
        except SluiceError as error:
            response = error_response(error)
        except HTTPException as error:
            response = plain_error_response(str(error.detail), error.status_code)
        await response(scope, receive, send)


class Serving:
    """A server and its application."""

    def __init__(self, server: HttpServer, app: Echo) -> None:
        self.host, _, port = server.address.rpartition(":")
        self.port = int(port)
        self.app = app

    async def ask(self, sent: bytes) -> bytes:
        return await answer(self.host, self.port, sent)

    async def until_it_serves(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    if (await self.ask(post(b"{}", "content-length: 2")))[9:12] == b"200":
                        break
                except OSError:
                    await asyncio.sleep(0.05)
        self.app.served.clear()


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    app = Echo()
    served = HttpServer(app, "127.0.0.1:0", 5, 1, bounds=BOUNDS)
    running = asyncio.create_task(served.serve())
    made = Serving(served, app)
    try:
        await made.until_it_serves()
        yield made
        await made.until_it_serves()  # whatever was sent to it
    finally:
        served.stop()
        await running


async def test_no_request_is_smuggled(serving: Serving) -> None:
    for name, request in MALFORMED.items():
        said = await everything(serving.host, serving.port, request + SECOND)
        assert said[9:12] in (b"400", b"408", b"499", b"501", b"505") or said.strip() == b"", (name, said)
        assert b"Traceback" not in said
        assert "/smuggled" not in serving.app.served, name


async def test_a_request_of_an_unknown_method_is_refused_or_ends_where_it_should(serving: Serving) -> None:
    last = SECOND.replace(b"host: x", b"host: x\r\nconnection: close")
    said = await everything(serving.host, serving.port, UNKNOWN_METHOD + last)
    assert said[9:12] == b"400"
    assert (serving.app.served, said.count(b"HTTP/1.1 ")) in (([], 1), (["/echo", "/smuggled"], 2))
