"""The HTTP server on real sockets: what is malformed, huge, slow or silent is bounded and closed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from services.common.net.http.bounds import Bounds
from services.gateway.apis.openai.choices import StreamedChoices
from services.gateway.apis.openai.completion_objects import ChatFormat
from services.gateway.core.request import Finish, FinishReason
from services.gateway.http.body import read_json
from services.gateway.http.errors import error_response, plain_error_response
from services.gateway.http.keepalive import KeepaliveMonitor
from services.gateway.http.server import HttpServer
from services.gateway.http.sse import EventStream
from services.gateway.http.write_scheduler import WriteScheduler
from tests.support.clients.raw_http import MALFORMED, UNKNOWN_METHOD, WAIT_S, answer, post
from tests.support.waiting import until

PIECE = "x" * 1000


class App:
    """Echoes JSON, and streams whatever the test says."""

    def __init__(self, watch: KeepaliveMonitor | None = None) -> None:
        self.write_scheduler = WriteScheduler(watch)
        self.choices: list[StreamedChoices] = []
        self.served: list[str] = []
        self.over = 0
        self.hold = asyncio.Event()
        self.hold.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.served.append(scope["path"])
        try:
            if scope["path"] == "/stream":
                choices = StreamedChoices(ChatFormat("chatcmpl-1", 1, "m", False), 1, False, lambda error: error)
                self.choices.append(choices)
                await EventStream(choices, self.write_scheduler, 64 << 10)(scope, receive, send)
                return
            await self.hold.wait()
            try:
                body = await read_json(Request(scope, receive), 1 << 16, 1.0)
                response = plain_error_response(json.dumps(body), 200)
            except Exception as error:
                status = getattr(error, "status_code", 0)
                said: Any = error
                response = plain_error_response(str(error.detail), status) if status else error_response(said)  # type: ignore[attr-defined]
            await response(scope, receive, send)
        finally:
            self.over += 1


@asynccontextmanager
async def served(app: App, drain_s: float = 5, **bounds: Any) -> AsyncIterator[tuple[str, int, HttpServer]]:
    server = HttpServer(app, "127.0.0.1:0", 5, drain_s, bounds=Bounds(**bounds))
    serving = asyncio.create_task(server.serve())
    host, _, port = server.address.rpartition(":")
    try:
        await until(lambda: server._server.started, WAIT_S)
        yield host, int(port), server
    finally:
        server.stop()
        await serving


async def test_a_plain_request() -> None:
    async with served(App()) as (host, port, _):
        said = await answer(host, port, post(b'{"a":1}', "content-length: 7"))
        assert said.startswith(b"HTTP/1.1 200")
        assert b'{\\"a\\": 1}' in said


async def test_small_parts_of_an_answer_are_sent_at_once() -> None:
    async with served(App()) as (host, port, server):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(post(b'{"a":1}', "content-length: 7"))
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = server._server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()


@pytest.mark.parametrize("request_", [*MALFORMED.values(), UNKNOWN_METHOD], ids=[*MALFORMED, "an unknown method"])
async def test_malformed_requests_are_refused_and_closed(request_: bytes) -> None:
    app = App()
    async with served(app, header_timeout_s=1.0) as (host, port, _):
        said = await answer(host, port, request_ + b"POST /smuggled HTTP/1.1\r\nhost: x\r\n\r\n")
        assert said[9:12] in (b"400", b"408"), said
        assert b"connection: close" in said.lower()
        assert b"Traceback" not in said
        assert "/smuggled" not in app.served


async def test_bodies_that_are_no_text() -> None:
    async with served(App()) as (host, port, _):
        for body in (b'{"a":"\xff\xfe"}', b"\xff", b'{"a":"\xed\xa0\x80"}', b'{"a":"\\ud800"}', b"{", b"[]", b""):
            said = await answer(host, port, post(body, f"content-length: {len(body)}"))
            assert said[9:12] == b"400", (body, said)
        said = await answer(host, port, post(b"{}", "x-latin: \xff", "content-length: 2"))
        assert said[9:12] == b"200", said


async def test_compressed_bodies_are_refused_unread() -> None:
    async with served(App()) as (host, port, _):
        for coding in ("gzip", "deflate", "br", "zstd", "identity, gzip", "GZIP"):
            said = await answer(host, port, post(b"{}", "content-length: 2", f"content-encoding: {coding}"))
            assert said[9:12] == b"415", said
        said = await answer(host, port, post(b"{}", "content-length: 2", "content-encoding: identity"))
        assert said[9:12] == b"200"


@pytest.mark.parametrize(
    "head",
    [
        b"POST /echo HTTP/1.1\r\nx-long: " + b"a" * 100_000,
        b"POST /" + b"a" * 100_000,
        b"POST /echo HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % number for number in range(2000)),
        b"POST /echo HTTP/1.1\r\n" + b"x" * 100_000,
    ],
    ids=["a long header", "a long target", "many headers", "a long name"],
)
async def test_headers_are_bounded(head: bytes) -> None:
    app = App()
    async with served(app, header_bytes=16 << 10) as (host, port, _):
        said = await answer(host, port, head)
        assert said[9:12] == b"431", said[:200]
        assert app.served == []


async def test_headers_that_never_end_are_closed_in_time() -> None:
    app = App()
    async with served(app, header_timeout_s=0.5) as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /echo HTTP/1.1\r\n")
        said = b""
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(OSError):  # what drips into a connection that closes just then resets it
                while not reader.at_eof():
                    writer.write(b"x: y\r\n")  # always a little more
                    with contextlib.suppress(TimeoutError):
                        said += await asyncio.wait_for(reader.read(1000), 0.1)
        assert said[9:12] in (b"408", b"")
        writer.close()
        assert app.served == []


async def test_a_body_that_never_ends_is_closed_in_time() -> None:
    async with served(App()) as (host, port, _):
        said = await answer(host, port, post(b'{"a', "content-length: 100"))
        assert said[9:12] == b"408"


async def test_connections_over_the_bound_are_refused() -> None:
    async with served(App(), connections=3) as (host, port, _):
        kept = [await asyncio.open_connection(host, port) for _ in range(3)]
        said = await answer(host, port, post(b"{}", "content-length: 2"))
        assert said[9:12] == b"503"
        assert b"\r\nretry-after: 1\r\n" in said
        kept[0][1].close()
        await kept[0][1].wait_closed()
        async with asyncio.timeout(WAIT_S):
            while (await answer(host, port, post(b"{}", "content-length: 2")))[9:12] != b"200":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for _, writer in kept[1:]:
            writer.close()


async def reading_nothing(host: str, port: int) -> socket.socket:
    """A client that asks for a stream and never reads, with as little room for it as the kernel gives."""
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await loop.sock_connect(client, (host, port))
    await loop.sock_sendall(client, b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
    return client


async def test_a_slow_reader_is_bounded_and_cut() -> None:
    app = App()
    async with served(app) as (host, port, server):
        client = await reading_nothing(host, port)
        await until(lambda: bool(app.choices))
        choices, written = app.choices[0], 0
        while not app.over:
            for sink in choices.sinks:
                sink.text(PIECE)
                written += len(PIECE)
            assert choices.unsent <= (64 << 10) + len(PIECE)
            await asyncio.sleep(0.001)
            assert written < 8 << 20, "it was never cut"
        await until(lambda: not server._server.server_state.connections)
        assert len(app.write_scheduler.keepalive) == 0
        client.close()


async def test_a_reader_that_stops_is_cut_even_if_nothing_more_comes() -> None:
    app = App(KeepaliveMonitor(comment_every_s=0.2, write_timeout_s=1.0))
    async with served(app) as (host, port, server):
        client = await reading_nothing(host, port)
        await until(lambda: bool(app.choices))
        choices = app.choices[0]
        for _ in range(400):
            for sink in choices.sinks:
                sink.text(PIECE)
            await asyncio.sleep(0)
            if cast(EventStream, choices.stream).blocked and choices.unsent > 20_000:
                break
        for sink in choices.sinks:
            sink.finish(Finish(FinishReason.STOP))
        await until(lambda: app.over == 1 and not server._server.server_state.connections)
        client.close()


async def test_silent_streams_get_comments_and_say_errors_as_events_then() -> None:
    app = App(KeepaliveMonitor(comment_every_s=0.2))
    async with served(app) as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"200 OK" in head
            await reader.readuntil(b": keep-alive\n\n")
            sink = app.choices[0].sinks[0]
            sink.text("hello")
            await reader.readuntil(b'"content":"hello"')
            await reader.readuntil(b": keep-alive\n\n")
            sink.finish(Finish(FinishReason.STOP))
            await reader.readuntil(b"data: [DONE]\n\n")
        writer.close()


async def test_a_client_that_was_told_that_the_connection_stays_may_send_one_more_request() -> None:
    """Its answer had begun when the server began to stop; no header could tell any more."""
    app = App()
    async with served(app) as (host, port, server):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: bool(app.choices))
        sink = app.choices[0].sinks[0]
        sink.text("hello")
        head = await reader.readuntil(b"hello")
        assert b"connection: close" not in head.lower()
        server.stop()
        await until(lambda: not server._server.servers[0].is_serving())
        sink.finish(Finish(FinishReason.STOP))
        async with asyncio.timeout(WAIT_S):
            await reader.readuntil(b"data: [DONE]\n\n")
            await reader.readuntil(b"0\r\n\r\n")
            writer.write(post(b"{}", "content-length: 2"))
            said = await reader.read()
        assert said.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in said.lower()
        writer.close()


async def test_a_client_that_leaves_is_noticed() -> None:
    app = App()
    async with served(app) as (host, port, _):
        _, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: bool(app.choices))
        writer.transport.abort()
        await until(lambda: app.over == 1)


async def test_a_connection_that_comes_to_be_while_the_server_stops_hears_that_its_request_is_the_last() -> None:
    """As when it was accepted in the same turn of the loop, or when its handshake takes longer."""
    async with served(App()) as (host, port, server):
        said = await answer(host, port, post(b"{}", "content-length: 2"))
        assert b"connection: close" not in said.lower()
        guarded: Any = server._server.config.http_protocol_class
        guarded.server_stops = True
        said = await answer(host, port, post(b"{}", "content-length: 2"))
        assert said.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in said.lower()


async def test_a_stop_lets_streams_finish_and_takes_no_new_connections() -> None:
    app = App()
    async with served(app) as (host, port, server):
        idle_reader, idle_writer = await asyncio.open_connection(host, port)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: bool(app.choices))
        server.stop()
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    _, other = await asyncio.open_connection(host, port)
                except ConnectionRefusedError:
                    break
                other.close()
                await asyncio.sleep(0.02)
            idle_writer.write(post(b"{}", "content-length: 2"))  # was on its way when the server began to stop
            said = await idle_reader.read()
            assert said.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in said
            app.choices[0].sinks[0].text("the rest")
            app.choices[0].sinks[0].finish(Finish(FinishReason.STOP))
            whole = await reader.read()
            assert b"the rest" in whole
            assert b"[DONE]" in whole
            assert b"connection: close" in whole
        for each in (writer, idle_writer):
            each.close()


async def test_the_rest_of_a_refused_body_is_no_request() -> None:
    async with served(App(), header_bytes=1024) as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        async with asyncio.timeout(WAIT_S):
            writer.write(b"POST /a HTTP/1.1\r\nhost: h\r\ncontent-length: 200000\r\n\r\n" + b" " * 70_000)
            first = await reader.readuntil(b"\r\n\r\n")
            size = int(first.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(size)
            writer.write(b" " * 60_000)
            await asyncio.sleep(0.2)
            writer.write(b" " * 70_000 + b"POST /b HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n{}")
            second = await reader.readuntil(b"\r\n")
        writer.close()
    assert b" 413 " in first
    assert second.startswith(b"HTTP/1.1 200")
