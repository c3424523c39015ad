"""Hostile clients at the gateway's HTTP edge: bodies, trailers, pipelining, refused bodies, long values, hosts and
origins. (Findings A3 and A5 to A8.)

What a process holds is looked at from outside, on a gateway of its own; the rest on a server in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.base import budgets
from services.common.net.http.bounds import Bounds
from services.gateway.http.middleware.hosts import HostMiddleware, host_policy
from services.gateway.http.server import HttpServer
from services.gateway.settings import GatewaySettings
from tests.support.clients.raw_http import WAIT_S, answer
from tests.support.servers.lone_gateway import LoneGateway
from tests.support.waiting import until

MAX_MIB = 300
PROMPT_S = 5.0
"""An answer within this time did not wait for what the hostile clients hold: that would take 15 s or longer."""

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def gateway() -> Iterator[LoneGateway]:
    with LoneGateway() as running:
        yield running


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the budgets that refuse something, in this process."""
    names: list[str] = []
    monkeypatch.setattr(budgets, "on_refused", names.append)
    return names


class App:
    """Says which requests it gets; `/early` is answered without a look at the body, `/hold` when `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.scopes: list[Scope] = []
        self.over: list[str] = []
        self.headers: list[list[tuple[bytes, bytes]]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if scope["path"] != "/early":
            with contextlib.suppress(Exception):
                await Request(scope, receive).body()
        self.headers.append(list(scope["headers"]))
        if scope["path"] == "/hold":
            await self.go.wait()
        self.over.append(scope["path"])
        await Response(scope["path"], 404 if scope["path"] == "/early" else 200)(scope, receive, send)


@asynccontextmanager
async def served(app: Any, keep_alive_s: int = 5, **bounds: Any) -> AsyncIterator[tuple[str, int]]:
    server = HttpServer(app, "127.0.0.1:0", keep_alive_s, 5, bounds=Bounds(**bounds))
    serving = asyncio.create_task(server.serve())
    host, _, port = server.address.rpartition(":")
    try:
        await until(lambda: server._server.started, WAIT_S)
        yield host, int(port)
    finally:
        server.stop()
        await serving


async def one_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Reads one response with a content-length; its status and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(head[9:12]), await reader.readexactly(length)


class Innocent:
    """A client that sends small requests, one after the other, and notes how long each answer took."""

    def __init__(self, gateway: LoneGateway) -> None:
        self._gateway = gateway
        self.waits_s: list[float] = []

    async def run(self) -> None:
        """Asks until cancelled."""
        reader, writer = await asyncio.open_connection(self._gateway.host, self._gateway.port)
        while True:
            began = monotonic()
            writer.write(CHAT + b"content-length: 2\r\n\r\n{}")
            status, _ = await one_answer(reader)
            assert status == 400  # it was read and checked
            self.waits_s.append(monotonic() - began)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def innocent(gateway: LoneGateway) -> AsyncIterator[Innocent]:
    """One that asks meanwhile, and has its last answer in time."""
    client = Innocent(gateway)
    asking = asyncio.create_task(client.run())
    try:
        yield client
        answered = len(client.waits_s)
        await until(lambda: len(client.waits_s) >= answered + 2 or asking.done(), PROMPT_S)
    finally:
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
    assert max(client.waits_s) < PROMPT_S


async def watch_memory(gateway: LoneGateway, seconds: float) -> float:
    """The most MiB that the gateway holds within some time; ends at once above the bound."""
    peak, until = 0.0, monotonic() + seconds
    while monotonic() < until and peak < MAX_MIB:
        peak = max(peak, gateway.rss_mib())
        await asyncio.sleep(0.05)
    return peak


class Flood:
    """Clients whose bodies never end.

    Attributes:
        sent: bytes that left them so far, all together.
    """

    def __init__(self, gateway: LoneGateway, body: memoryview, announced: bytes) -> None:
        self._gateway = gateway
        self._body = body
        self._announced = announced
        self.sent = 0

    async def send(self) -> None:
        """Sends what the gateway takes of a body, and stays until cancelled."""
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, (self._gateway.host, self._gateway.port))
            with contextlib.suppress(OSError):  # it may be refused while it is sending
                await loop.sock_sendall(client, CHAT + self._announced + b"\r\n\r\n")
                for start in range(0, len(self._body), 1 << 18):
                    part = self._body[start : start + (1 << 18)]
                    await loop.sock_sendall(client, part)
                    self.sent += len(part)
            await asyncio.Event().wait()

    async def watch_memory(self) -> float:
        """The most MiB that the gateway holds until it takes hardly anything; ends at once above the bound."""
        peak, sent, until = 0.0, 0, monotonic() + WAIT_S
        while monotonic() < until and peak < MAX_MIB:
            peak = max(peak, await watch_memory(self._gateway, 0.75))
            if self.sent - sent < 4 << 20 and sent:
                break
            sent = self.sent
        return peak


@pytest.mark.parametrize("announced", [b"content-length: 10137700", b"transfer-encoding: chunked"])
async def test_bodies_unfinished_hold_bounded_memory_and_delay_no_other_client(
    gateway: LoneGateway, announced: bytes
) -> None:
    """A3: 100 bodies of 9.9 MiB, of which the last byte never comes."""
    text = b'{"messages":[{"role":"user","content":"' + b"a" * (9_900 << 10)
    body = memoryview(text if b"length" in announced else b"%x\r\n" % (len(text) + 1) + text)
    async with innocent(gateway):
        flood = Flood(gateway, body, announced)
        senders = [asyncio.create_task(flood.send()) for _ in range(100)]
        peak = await flood.watch_memory()
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
    assert peak < MAX_MIB


async def test_requests_with_large_bodies_leave_time_to_others() -> None:
    """A8: bodies of megabytes, one after the other, whose parsing would take all of the gateway's time."""
    body = b'{"model":"' + b"m" * (4 << 20) + b'"}'
    with LoneGateway() as gateway:
        async with innocent(gateway), httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http:
            headers = {"content-type": "application/json"}
            found = await asyncio.gather(
                *(http.post("/v1/chat/completions", content=body, headers=headers) for _ in range(6))
            )
        assert {one.status_code for one in found} == {400}


async def test_requests_pipelined_hold_bounded_memory_and_delay_no_other_client(gateway: LoneGateway) -> None:
    """A6: 21 MB of small requests on one connection."""
    request = b"GET /v1/nothing HTTP/1.1\r\nhost: localhost\r\n\r\n"
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)

    async def read_on() -> None:
        while await reader.read(1 << 20):
            pass

    reading = asyncio.create_task(read_on())
    before = gateway.rss_mib()
    async with innocent(gateway):
        writer.write(request * (21_000_000 // len(request)))
        peak = await watch_memory(gateway, 3.0)
    writer.transport.abort()
    reading.cancel()
    assert peak - before < 50
    shown = await asyncio.to_thread(httpx.get, f"{gateway.url}/metrics")
    assert 'budget="pipelined_requests",service="gateway"} 1.0' in shown.text


async def test_requests_pipelined_are_answered_in_order_and_run_one_at_a_time(refused: list[str]) -> None:
    app = App()
    async with served(app) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        paths = [b"/hold", *(b"/%d" % number for number in range(500))]
        requests = [b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path for path in paths]
        requests[7::10] = [
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n\r\n\r\n" % path for path in paths[7::10]
        ]
        writer.write(b"".join(requests))
        async with asyncio.timeout(WAIT_S):
            while not app.scopes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert len(app.scopes) == 1, "none is begun before the one before it is answered"
            assert refused == ["pipelined_requests"]
            app.go.set()
            assert [(await one_answer(reader))[1] for _ in paths] == paths
        writer.close()


async def test_requests_pipelined_behind_a_chunked_body_are_not_answered_twice_nor_mixed_up() -> None:
    app = App()
    async with served(app) as (host, port):
        chunked = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        said = await answer(host, port, chunked + b"GET /b HTTP/1.1\r\nhost: x\r\n\r\n" * 3)
    assert said.endswith(b"/a")
    assert b"connection: close" in said.lower(), "so its client sends the others again"
    assert app.over == ["/a"]


async def test_a_client_that_pipelines_and_leaves_is_noticed() -> None:
    gone = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async with served(app) as (host, port):
        _, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n" * 3)
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.transport.abort()
        async with asyncio.timeout(WAIT_S):
            await gone.wait()


TRAILED = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ntrailer: authorization\r\n\r\n2\r\n{}\r\n0\r\n"


async def test_trailers_are_no_headers() -> None:
    """A5: an API key that comes after the body was seen by no proxy."""
    app = App()
    async with served(app) as (host, port):
        for trailer in (b"authorization: Bearer k", b"x-api-key: k", b"connection: close", b"expect: 100-continue"):
            app.headers.clear()
            said = await answer(host, port, TRAILED + trailer + b"\r\n\r\n")
            assert said.startswith(b"HTTP/1.1 200")
            names = [name for name, _ in app.headers[0]]
            assert names == [b"host", b"transfer-encoding", b"trailer"]


@pytest.mark.parametrize(
    "flood", [b"x: y\r\n" * 200, b"x: " + b"y" * 100_000, b"x" * 100_000], ids=["lines", "a long value", "a long name"]
)
async def test_trailers_without_end_are_refused(flood: bytes) -> None:
    async with served(App(), header_bytes=16 << 10) as (host, port):
        said = await answer(host, port, TRAILED + flood)
    assert said[9:12] == b"431"


async def test_chunk_framing_without_body_is_refused() -> None:
    async with served(App(), header_bytes=16 << 10) as (host, port):
        head = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2;"
        said = await answer(host, port, head + b"e" * 100_000)
    assert said[9:12] == b"431"


@pytest.mark.parametrize("head", [b"content-length: 1000000", b"transfer-encoding: chunked"])
async def test_the_rest_of_a_refused_body_that_trickles_is_closed_in_time(head: bytes) -> None:
    """A7."""
    async with served(App(), body_timeout_s=0.5) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /early HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % head)
        async with asyncio.timeout(WAIT_S):
            assert (await one_answer(reader))[0] == 404
            with contextlib.suppress(OSError):
                while not reader.at_eof():
                    writer.write(b"1\r\nx\r\n")
                    with contextlib.suppress(TimeoutError):
                        assert await asyncio.wait_for(reader.read(10), 0.1) == b""
        writer.close()


async def test_a_connection_whose_refused_body_came_whole_stays_for_the_next_request() -> None:
    async with served(App(), body_timeout_s=0.5) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + b"x" * 50_000)
        async with asyncio.timeout(WAIT_S):
            assert (await one_answer(reader))[0] == 404
            writer.write(b"x" * 50_000)
            await asyncio.sleep(0.8)
            writer.write(b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await one_answer(reader) == (200, b"/next")
        writer.close()


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_an_answer_that_is_not_taken_is_cut_in_time(connection: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # In one piece, so that the application does not wait for its client.
        await Response(b"x" * (8 << 20), headers={"connection": connection})(scope, receive, send)

    loop = asyncio.get_running_loop()
    async with served(app, keep_alive_s=1) as (host, port):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, (host, port))
        await loop.sock_sendall(client, b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
        taken = 0
        async with asyncio.timeout(WAIT_S):
            await asyncio.sleep(2)
            with contextlib.suppress(ConnectionResetError):
                while data := await loop.sock_recv(client, 1 << 20):
                    taken += len(data)
        assert taken < 8 << 20
        client.close()


LONG = "n" * 9_000_000


@pytest.mark.parametrize(
    "body",
    [
        {"model": LONG, "messages": [{"role": "user", "content": "hi"}]},
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], LONG: 1},
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "response_format": {"type": LONG}},
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tool_choice": LONG},
    ],
    ids=["model", "field", "format", "tool choice"],
)
def test_values_of_clients_in_errors_are_short(gateway: LoneGateway, body: dict[str, Any]) -> None:
    """A8: a 9 MB name came back in a 9 MB answer."""
    found = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=30)
    assert 400 <= found.status_code <= 503
    assert len(found.content) < 3000
    assert found.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/embeddings", "/tokenize"])
def test_a_long_model_name_comes_back_short_from_every_api(gateway: LoneGateway, path: str) -> None:
    text = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} if "messages" in path else {"input": "hi"}
    body = {"model": LONG, **({"prompt": "hi"} if path == "/tokenize" else text)}
    found = httpx.post(gateway.url + path, json=body, timeout=30)
    assert 400 <= found.status_code <= 503
    assert len(found.content) < 1000
    assert "nnnn" in found.text


async def asked(gateway: LoneGateway, *headers: str, version: str = "1.1", target: str = "/health") -> bytes:
    lines = [f"GET {target} HTTP/{version}", *headers, "connection: close", "", ""]
    return await answer(gateway.host, gateway.port, "\r\n".join(lines).encode("latin-1"))


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("host: localhost", "host: evil.example"),
        ("host: localhost", "host: localhost"),
        ("host: a b",),
        ("host: a/b",),
    ],
    ids=["none", "two", "the same twice", "a space", "a path"],
)
async def test_a_request_without_exactly_one_host_is_refused(gateway: LoneGateway, headers: tuple[str, ...]) -> None:
    said = await asked(gateway, *headers)
    assert said[9:12] == b"400"
    assert b"Host header" in said


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1:8000", "[::1]", "[::1]:80"])
async def test_a_gateway_on_loopback_is_served_under_its_own_names(gateway: LoneGateway, host: str) -> None:
    assert (await asked(gateway, f"host: {host}"))[9:12] == b"200"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "127.0.0.1.evil.example", ""]
)
async def test_a_gateway_on_loopback_is_not_served_under_other_names(gateway: LoneGateway, host: str) -> None:
    """A8: a page of evil.example, whose name was made to point to 127.0.0.1."""
    said = await asked(gateway, f"host: {host}")
    assert said[9:12] == b"421"
    assert b"--allowed-hosts" in said


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1", "https://127.0.0.1"])
def test_a_page_of_another_origin_is_refused(gateway: LoneGateway, origin: str) -> None:
    found = httpx.post(
        f"{gateway.url}/v1/chat/completions", json={}, headers={"origin": origin, "content-type": "application/json"}
    )
    assert found.status_code == 403
    assert found.json()["error"]["code"] == "origin_not_allowed"
    assert "--allowed-origins" in found.json()["error"]["message"]


def test_a_page_of_the_gateway_itself_is_served(gateway: LoneGateway) -> None:
    for url in (gateway.url, f"http://localhost:{gateway.port}"):
        assert httpx.get(f"{url}/ui/", headers={"origin": url}).status_code == 200
        assert httpx.get(f"{url}/ui/data/state", headers={"origin": url}).status_code == 200
        assert httpx.post(f"{url}/v1/chat/completions", json={}, headers={"origin": url}).status_code == 400


def test_refused_hosts_and_origins_are_counted(gateway: LoneGateway) -> None:
    httpx.get(f"{gateway.url}/health", headers={"host": "evil.example"})
    httpx.get(f"{gateway.url}/health", headers={"origin": "http://evil.example"})
    shown = httpx.get(f"{gateway.url}/metrics").text
    for reason in ("host", "origin"):
        line = next(
            line for line in shown.splitlines() if line.startswith(f'sluice_gateway_refused_total{{reason="{reason}"')
        )
        assert float(line.split()[-1]) >= 1


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize"]
)
@pytest.mark.parametrize(
    "kind",
    ["text/plain", "Text/Plain; charset=utf-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"],
)
def test_a_body_of_a_kind_that_pages_may_send_anywhere_is_refused(gateway: LoneGateway, path: str, kind: str) -> None:
    found = httpx.post(gateway.url + path, content=b"{}", headers={"content-type": kind})
    assert found.status_code == 415
    assert "content-type: application/json" in found.text


@pytest.mark.parametrize(
    "kind", [None, "application/json", "application/json; charset=utf-8", "application/vnd.x+json"]
)
def test_a_body_of_json_or_of_no_kind_is_read(gateway: LoneGateway, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    found = httpx.post(f"{gateway.url}/v1/chat/completions", content=json.dumps({}), headers=headers)
    assert found.status_code == 400
    assert found.json()["error"]["code"] == "missing_required_parameter"


def checked(**settings: Any) -> httpx.AsyncClient:
    """A client of an application behind the host check that these settings give."""
    chosen = GatewaySettings(**settings)
    policy = host_policy(chosen.listen, chosen.allowed_hosts, chosen.allowed_origins)
    return httpx.AsyncClient(transport=httpx.ASGITransport(HostMiddleware(App(), policy, lambda reason: None)))


async def test_hosts_and_origins_that_are_allowed_are_served() -> None:
    async with checked(allowed_hosts=["LLM.example"], allowed_origins=["https://chat.example/"]) as client:
        for host, origin, status in (
            ("llm.example:8000", None, 200),
            ("localhost", None, 200),
            ("other.example", None, 421),
            ("llm.example", "https://chat.example", 200),
            ("llm.example", "https://llm.example", 200),
            ("llm.example", "http://chat.example", 403),
        ):
            headers = {"host": host, **({} if origin is None else {"origin": origin})}
            assert (await client.get("http://x/", headers=headers)).status_code == status, (host, origin)


@pytest.mark.parametrize(
    ("listen", "allowed", "host", "status"),
    [
        ("0.0.0.0:8000", [], "llm.example", 200),
        ("0.0.0.0:8000", [], "a b", 400),
        ("0.0.0.0:8000", ["llm.example"], "llm.example", 200),
        ("0.0.0.0:8000", ["llm.example"], "other.example", 421),
        ("0.0.0.0:8000", ["llm.example"], "10.1.2.3:8000", 200),  # probes of Kubernetes ask by address
        ("[::1]:8000", [], "evil.example", 421),
        ("localhost:8000", [], "evil.example", 421),
        ("localhost:8000", ["*"], "evil.example", 200),
    ],
)
async def test_which_hosts_are_served_depends_on_where_the_gateway_listens(
    listen: str, allowed: list[str], host: str, status: int
) -> None:
    async with checked(listen=listen, allowed_hosts=allowed) as client:
        assert (await client.get("http://x/", headers={"host": host})).status_code == status


async def test_pages_of_any_origin_are_served_where_hosts_are_not_checked() -> None:
    async with checked(listen="0.0.0.0:8000") as client:
        headers = {"host": "llm.example", "origin": "https://chat.example"}
        assert (await client.get("http://x/", headers=headers)).status_code == 200
