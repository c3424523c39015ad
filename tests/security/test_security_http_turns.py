"""Work per turn of the event loop at the HTTP servers of the gateway and of the router: chunks, headers, pipelines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.base import budgets
from services.gateway.http.server import HttpServer
from services.router.http_api.server import bounded_server
from tests.support.clients.raw_http import WAIT_S, answer, everything
from tests.support.waiting import until

MAX_PARTS_PER_TURN = 4_500
"""Callbacks of the parser in one turn: those of a few slices of 8 KiB, and what an event loop may add."""
CHUNKED = b"POST /%b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


class App:
    """Records requests and their bodies; `/hold` is answered when `go` is set, `/early` without its body."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun: list[str] = []
        self.bodies: list[tuple[str, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self.begun.append(path)
        if path != "/early":
            try:
                self.bodies.append((path, await Request(scope, receive).body()))
            except ClientDisconnect:
                return
        if path == "/hold":
            await self.go.wait()
        await Response(path)(scope, receive, send)


class Parts:
    """Counts the callbacks of a server's HTTP parsers.

    Attributes:
        peak: the most in one turn of the event loop.
        requests: requests whose first byte was parsed.
    """

    def __init__(self, protocol: Any) -> None:
        self.peak = self.requests = self._turn = 0
        for name in ("on_url", "on_header", "on_body", "on_message_begin"):
            setattr(protocol, name, self._counted(getattr(protocol, name), name == "on_message_begin"))
        asyncio.get_running_loop().call_soon(self._next_turn)

    def _counted(self, call: Callable[..., None], begins: bool) -> Callable[..., None]:
        def counted(*args: Any) -> None:
            self._turn += 1
            self.peak = max(self.peak, self._turn)
            self.requests += begins
            call(*args)

        return counted

    def _next_turn(self) -> None:
        self._turn = 0
        asyncio.get_running_loop().call_soon(self._next_turn)


class Served(Protocol):
    """Starts a server of one kind; provides its address and the class of its connections."""

    def __call__(self, app: Any) -> contextlib.AbstractAsyncContextManager[tuple[str, int, Any]]: ...


def _config(server: Any) -> tuple[Any, Any]:
    """Returns the embedded uvicorn server of any server, and its configuration."""
    while not hasattr(server, "config"):
        server = server._server
    return server, server.config


@asynccontextmanager
async def gateway(app: Any) -> AsyncIterator[tuple[str, int, Any]]:
    server = HttpServer(app, "127.0.0.1:0", 5, 5)
    embedded, config = _config(server)
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: embedded.started, WAIT_S)
        yield "127.0.0.1", int(server.address.rpartition(":")[2]), config.http_protocol_class
    finally:
        server.stop()
        await serving


@asynccontextmanager
async def twin(app: Any) -> AsyncIterator[tuple[str, int, Any]]:
    server = bounded_server(app, "127.0.0.1:0", None, 5.0)
    embedded, config = _config(server)
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: embedded.started, WAIT_S)
        port = embedded.servers[0].sockets[0].getsockname()[1]
        yield "127.0.0.1", port, config.http_protocol_class
    finally:
        server.stop()
        await serving


SERVERS = pytest.mark.parametrize("served", [gateway, twin])


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the budgets that refuse something, in this process."""
    names: list[str] = []
    monkeypatch.setattr(budgets, "on_refused", names.append)
    return names


@SERVERS
@pytest.mark.parametrize(
    "chunk", [b"1\r\na\r\n", b"2;x=yyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\naa\r\n"], ids=["byte", "extension"]
)
async def test_chunks_of_few_bytes_are_refused_after_a_bounded_number(
    served: Served, chunk: bytes, refused: list[str]
) -> None:
    app = App()
    async with served(app) as (host, port, protocol):
        parts = Parts(protocol)
        said = await everything(host, port, CHUNKED % b"a" + chunk * (1_000_000 // len(chunk)) + b"0\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 400")
    assert b"chunks" in said
    assert b"connection: close" in said
    assert refused == ["body_chunks"]
    assert app.bodies == []
    assert parts.peak < MAX_PARTS_PER_TURN


@SERVERS
async def test_chunks_of_64_bytes_are_accepted_in_bounded_turns(served: Served, refused: list[str]) -> None:
    app, size = App(), 30_000
    async with served(app) as (host, port, protocol):
        parts = Parts(protocol)
        said = await answer(host, port, CHUNKED % b"a" + (b"40\r\n" + b"a" * 64 + b"\r\n") * size + b"0\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 200")
    assert app.bodies == [("/a", b"a" * 64 * size)]
    assert refused == []
    assert parts.peak < 1_000


@SERVERS
async def test_small_chunks_of_a_short_body_are_accepted_in_bounded_turns(served: Served) -> None:
    app, size = App(), 6_000
    async with served(app) as (host, port, protocol):
        parts = Parts(protocol)
        said = await answer(host, port, CHUNKED % b"a" + b"1\r\na\r\n" * size + b"0\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 200")
    assert app.bodies == [("/a", b"a" * size)]
    assert parts.peak < MAX_PARTS_PER_TURN


@SERVERS
@pytest.mark.parametrize("line", [b"a:\r\n", b"x: y\r\n"])
async def test_headers_of_few_bytes_are_refused_after_a_bounded_number(
    served: Served, line: bytes, refused: list[str]
) -> None:
    app = App()
    async with served(app) as (host, port, protocol):
        parts = Parts(protocol)
        said = await everything(host, port, b"GET /a HTTP/1.1\r\n" + line * 8_000 + b"\r\n")
    assert said.startswith(b"HTTP/1.1 431")
    assert refused == ["headers"]
    assert app.begun == []
    assert parts.peak < MAX_PARTS_PER_TURN


@SERVERS
async def test_requests_pipelined_are_parsed_one_at_a_time(served: Served, refused: list[str]) -> None:
    app, count = App(), 2_000
    async with served(app) as (host, port, protocol):
        parts = Parts(protocol)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /hold HTTP/1.1\r\nhost: x\r\n\r\n" + b"GET /b HTTP/1.1\r\nhost: x\r\n\r\n" * count)
        async with asyncio.timeout(WAIT_S):
            while not refused:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (parts.requests, app.begun, refused) == (1, ["/hold"], ["pipelined_requests"])
            app.go.set()
            said = b""
            while said.count(b"HTTP/1.1 200") <= count:
                said += await reader.read(1 << 16)
        writer.close()
    assert app.begun == ["/hold"] + ["/b"] * count
    assert parts.peak < 100


@SERVERS
async def test_rest_of_a_body_that_is_refused_after_its_response_gets_no_second_response(served: Served) -> None:
    async with served(App()) as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(CHUNKED % b"early" + b"1\r\na\r\n")
        async with asyncio.timeout(WAIT_S):
            await reader.readuntil(b"/early")
            with contextlib.suppress(OSError):
                writer.write(b"1\r\na\r\n" * 100_000)
                assert await reader.read() == b""
        writer.close()


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[bytes], list[tuple[str, bytes]]]:
    """Returns requests as bytes, a chunked one being the last of its connection, and the path and body of each."""
    requests, expected = [], []
    for number in range(draw(st.integers(1, 4))):
        unit = draw(st.sampled_from([b"a", b"\r\n", b"0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"]))
        body = unit * draw(st.integers(0, 20_000) | st.integers(0, 9))
        lines = b"".join(
            b"x-%d: %b\r\n" % (n, b"v" * draw(st.integers(0, 300))) for n in range(draw(st.integers(0, 90)))
        )
        head = b"POST /%d HTTP/1.1\r\nhost: x\r\n%b" % (number, lines)
        expected.append((f"/{number}", body))
        if not draw(st.booleans()):
            requests.append(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            continue
        size = draw(st.sampled_from([64, 100, 8191, 8192, 8193, 70_000]) if len(body) > 5_000 else st.integers(1, 100))
        chunks = (body[start : start + size] for start in range(0, len(body), size))
        framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        trailer = draw(st.sampled_from([b"", b"x-t: y\r\n" * 100]))
        requests.append(head + b"transfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n" + trailer + b"\r\n")
        break  # what follows a chunked body in the same read is not served
    return requests, expected


@SERVERS
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=pipelines(), cuts=st.lists(st.integers(1, 40_000) | st.integers(1, 20), max_size=12), patient=st.booleans())
async def test_honest_requests_arrive_unchanged_however_they_are_cut(
    served: Served, case: tuple[list[bytes], list[tuple[str, bytes]]], cuts: list[int], patient: bool
) -> None:
    requests, expected = case
    app, sent = App(), b"".join(requests)
    async with served(app) as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        async with asyncio.timeout(WAIT_S):
            for cut in [*cuts, len(sent)]:
                writer.write(sent[:cut])
                sent = sent[cut:]
                if patient:
                    await writer.drain()
                    await asyncio.sleep(0.001)
            for path, _ in expected:
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200"), head
                assert await reader.readexactly(len(path)) == path.encode()
        writer.close()
    assert app.bodies == expected
