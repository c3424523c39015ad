"""The gateway's HTTP server behind TLS: certificates rotate, strangers are refused, running requests go on."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from services.common.base.errors import SluiceError
from services.common.rpc.probe import probe_http
from services.common.security import file_watcher as watched
from services.common.security.settings import HttpsSettings
from services.common.security.tls import https_context
from services.gateway.http.server import HttpServer
from tests.support.data.authority import Authority


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "CHECK_EVERY_S", 0.0)


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse(request.url.scheme)


async def drip(request: Request) -> StreamingResponse:
    async def text() -> AsyncIterator[str]:
        while True:
            yield "drop\n"
            await asyncio.sleep(0.01)

    return StreamingResponse(text())


async def listening(server: HttpServer) -> None:
    host, _, port = server.address.rpartition(":")
    for _ in range(400):
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    raise AssertionError("the server does not listen")


@asynccontextmanager
async def serving(settings: HttpsSettings) -> AsyncIterator[HttpServer]:
    app = Starlette(routes=[Route("/", hello), Route("/drip", drip)])
    server = HttpServer(app, "127.0.0.1:0", 75, 1, https_context(settings))
    running = asyncio.create_task(server.serve())
    try:
        await listening(server)
        yield server
    finally:
        server.stop()
        await asyncio.wait_for(running, 20)


def https(authority: Authority, name: str) -> HttpsSettings:
    issued = authority.issue(name)
    return HttpsSettings(https_cert=issued.tls_cert, https_key=issued.tls_key)


def client(server: HttpServer, trusted: Authority, mine: HttpsSettings | None = None) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=str(trusted.file))
    if mine is not None:
        assert mine.https_cert is not None
        context.load_cert_chain(mine.https_cert, mine.https_key)
    return httpx.AsyncClient(base_url=f"https://{server.address}", verify=context, timeout=20, trust_env=False)


async def test_a_new_certificate_is_shown_to_new_connections_while_streams_go_on(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serving(https(authority, "gateway")) as server:
        host, _, port = server.address.rpartition(":")

        async def shown() -> str:
            return await asyncio.to_thread(
                ssl.get_server_certificate, (host, int(port)), timeout=20, ca_certs=str(authority.file)
            )

        before = await shown()
        async with client(server, authority) as http, http.stream("GET", "/drip") as answer:
            drops = answer.aiter_lines()
            assert await anext(drops) == "drop"
            renewed = https(authority, "gateway")
            after = await shown()
            assert renewed.https_cert is not None
            assert before != after
            assert after.split() == (await asyncio.to_thread(renewed.https_cert.read_text)).split()
            for _ in range(10):
                assert await anext(drops) == "drop"
            assert (await http.get("/")).text == "https"
            assert renewed.https_key is not None
            renewed.https_key.unlink()
            async with client(server, authority) as another:
                assert (await another.get("/")).text == "https"


async def test_only_clients_of_the_authority_are_let_in_where_it_is_asked_for(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    settings = https(authority, "gateway").model_copy(update={"https_client_ca": authority.file})
    late = authority.issue("late", expired=True)
    expired = HttpsSettings(https_cert=late.tls_cert, https_key=late.tls_key)
    async with serving(settings) as server:
        async with client(server, authority, https(authority, "friend")) as http:
            assert (await http.get("/")).status_code == 200
        for mine in (None, https(other, "stranger"), expired):
            async with client(server, authority, mine) as http:
                with pytest.raises(httpx.TransportError):
                    await http.get("/")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"https_key": None}, "https-cert and https-key must be set together"),
        ({"https_cert": None, "https_key": None}, "https-client-ca requires"),
        ({"https_key": "other.key"}, "must be a certificate and its unencrypted key"),
        ({"https_cert": "missing.pem"}, "cannot be read: No such file"),
        ({"https_client_ca": "gateway.key"}, "contains no certificate"),
    ],
)
def test_wrong_files_are_one_sentence(tmp_path: Path, wrong: dict[str, str | None], says: str) -> None:
    authority = Authority(tmp_path)
    authority.issue("other")
    changes = {name: tmp_path / value if value else None for name, value in wrong.items()}
    settings = https(authority, "gateway").model_copy(update={"https_client_ca": authority.file, **changes})
    with pytest.raises(SluiceError, match=says) as refused:
        https_context(settings)
    assert "\n" not in refused.value.message


async def test_the_probe_of_a_container_asks_over_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path / "ours")
    settings = https(authority, "gateway").model_copy(update={"https_client_ca": authority.file})
    other = https(Authority(tmp_path / "theirs"), "gateway")
    async with serving(settings) as server:
        url = f"https://{server.address}/"
        for shown, ready in ((settings, True), (other, False)):
            monkeypatch.setenv("SLUICE_GATEWAY_HTTPS_CERT", str(shown.https_cert))
            monkeypatch.setenv("SLUICE_GATEWAY_HTTPS_KEY", str(shown.https_key))
            problem = await asyncio.to_thread(probe_http, url, "gateway")
            assert (problem == "") is ready, problem
        monkeypatch.setenv("SLUICE_GATEWAY_HTTPS_CERT", str(tmp_path / "none"))
        assert "No such file" in await asyncio.to_thread(probe_http, url, "gateway")
