"""Web pages of other sites at every HTTP server: hosts, origins and types of bodies. (Findings A13, A15.)"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response

from services.common.net import http_policy as policies
from services.common.net.http_policy import HttpPolicy, http_policy
from services.common.net.ports import free_port
from services.common.observability.scrape_server import ScrapeEndpoint
from services.gateway.http.middleware.hosts import HostMiddleware, host_policy
from services.gateway.settings import GatewaySettings
from tests.support.servers.router_cluster import routers

SERVERS = ("gateway", "twin", "metrics")
PATHS = {"gateway": "/health", "twin": "/workers", "metrics": "/metrics"}
FOREIGN = (
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:1"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"},
)


async def ok(scope: Any, receive: Any, send: Any) -> None:
    await Request(scope, receive).body()
    await Response("{}")(scope, receive, send)


@asynccontextmanager
async def gateway(listen: str, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    settings = GatewaySettings(listen=listen, **more)
    app: Any = HostMiddleware(
        ok, host_policy(settings.listen, settings.allowed_hosts, settings.allowed_origins), lambda reason: None
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
        yield client


@asynccontextmanager
async def served(server: str) -> AsyncIterator[httpx.AsyncClient]:
    """One of the servers on loopback, and a client of it."""
    if server == "gateway":
        async with gateway("127.0.0.1:8000") as client:
            yield client
    elif server == "twin":
        address = f"127.0.0.1:{free_port()}"
        async with (
            routers(drain_s=2, http_listen=address),
            httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as client,
        ):
            yield client
    else:
        endpoint = ScrapeEndpoint("127.0.0.1:0")
        endpoint.start()
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{endpoint.port}", timeout=60) as client:
                yield client
        finally:
            await asyncio.to_thread(endpoint.close)


@pytest.mark.parametrize("server", SERVERS)
async def test_pages_of_other_sites_are_refused_by_every_server_on_loopback(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    monkeypatch.setattr(policies, "on_refused", refused.append)
    path = PATHS[server]
    async with served(server) as client:
        rebound = await client.get(path, headers={"host": "evil.example"})
        assert (rebound.status_code, rebound.json()["error"]["code"]) == (421, "host_not_allowed")
        for headers in FOREIGN:
            found = await client.get(path, headers=headers)
            assert (found.status_code, found.json()["error"]["code"]) == (403, "origin_not_allowed"), headers
        assert refused == ["host", *["origin"] * len(FOREIGN)]
        for own in ({}, {"origin": str(client.base_url).rstrip("/")}, {"sec-fetch-site": "same-origin"}):
            assert (await client.get(path, headers=own)).status_code == 200, own
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await client.get(path, headers=link)).status_code == 200


async def test_page_of_another_site_neither_reserves_nor_frees_by_the_http_twin() -> None:
    async with served("twin") as client:
        for headers in FOREIGN:
            for path in ("/route", "/free", "/prefill_complete"):
                found = await client.post(path, content=b"{}", headers=headers)
                assert found.status_code == 403, (path, headers)


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize(
    "kind", ["", "text/plain", "text/json", "multipart/form-data; boundary=a", "application/octet"]
)
async def test_body_of_a_foreign_page_without_a_json_type_is_refused_off_loopback(
    headers: dict[str, str], kind: str
) -> None:
    """A15: browsers send such bodies without asking first, and the gateway on a network read them as JSON."""
    async with gateway("0.0.0.0:8000") as client:
        found = await client.post(
            "/v1/chat/completions", content=b"{}", headers={**headers, **({"content-type": kind} if kind else {})}
        )
        assert (found.status_code, found.json()["error"]["code"]) == (415, "content_type_not_allowed")
        json_type = {**headers, "content-type": "application/json; charset=utf-8"}
        assert (await client.post("/v1/chat/completions", content=b"{}", headers=json_type)).status_code == 200
        assert (await client.post("/v1/chat/completions", content=b"{}")).status_code == 200


async def test_body_of_an_allowed_page_may_have_any_type() -> None:
    async with gateway("0.0.0.0:8000", allowed_origins=["https://chat.example"]) as client:
        headers = {"origin": "https://chat.example", "sec-fetch-site": "cross-site"}
        assert (await client.post("/v1/files", content=b"{}", headers=headers)).status_code == 200


NAMES = st.sampled_from((b"host", b"origin", b"content-type", b"sec-fetch-site", b"sec-fetch-mode", b"x"))
VALUES = st.one_of(
    st.binary(max_size=12),
    st.sampled_from((
        b"localhost", b"127.0.0.1:80", b"[::1]:80", b"evil.example", b"http://localhost", b"null", b"cross-site",
        b"same-origin", b"navigate", b"application/json", b"application/json;a=b", b"text/plain", b"",
    )),
)  # fmt: skip


@given(st.lists(st.tuples(NAMES, VALUES), max_size=8), st.sampled_from(("GET", "POST", "PUT")), st.booleans())
def test_headers_of_any_kind_are_accepted_only_from_known_pages(
    headers: list[tuple[bytes, bytes]], method: str, loopback: bool
) -> None:
    policy: HttpPolicy = http_policy("127.0.0.1:80" if loopback else "0.0.0.0:80")
    refusal = policy.refusal(headers, method)
    assert refusal is None or refusal.status in (400, 403, 415, 421)
    if refusal is not None:
        return
    values = {name: [value for key, value in headers if key == name] for name, _ in headers}
    [host] = values[b"host"]
    own = {b"http://" + host.lower(), b"https://" + host.lower()}
    strangers = [one for one in values.get(b"origin", []) if one.lower() not in own]
    if loopback:
        assert host.lower().rpartition(b":")[0] in (b"localhost", b"127.0.0.1", b"[::1]", b"") or host == b"localhost"
        assert not strangers
    if strangers and method == "POST":
        assert [kind.partition(b";")[0] for kind in values[b"content-type"]] == [b"application/json"]
