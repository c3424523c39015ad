"""HTML pages of the gateway: nothing of other hosts, nothing that runs in them but their own files. (Finding A17.)"""

from __future__ import annotations

import re

import httpx
import pytest

from services.gateway.app.api_page import api_page
from tests.support.servers.lone_gateway import LoneGateway


def test_pages_of_the_gateway_load_nothing_from_other_hosts() -> None:
    with LoneGateway("--ui") as gateway, httpx.Client(base_url=gateway.url, timeout=60) as http:
        pages = {path: http.get(path) for path in ("/docs", "/ui/", "/redoc", "/docs/oauth2-redirect")}
        paths = http.get("/openapi.json").json()["paths"]
    shown = [path for path, found in pages.items() if "html" in found.headers["content-type"]]
    assert shown == ["/docs", "/ui/"]
    for path in shown:
        policy = pages[path].headers["content-security-policy"]
        assert policy.startswith("default-src 'none'"), path
        assert "unsafe" not in policy
        assert "http" not in policy
        assert not re.search(r"(?:src|href)=.(?:https?:)?//", pages[path].text), path
    assert "<script" not in pages["/docs"].text
    for path in paths:
        assert path in pages["/docs"].text


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", '"><img src=x>', "</style>"])
def test_api_page_shows_texts_of_the_document_as_text(text: str) -> None:
    operation = {
        "summary": text,
        "description": text,
        "tags": [text],
        "parameters": [{"name": text, "description": text, "schema": {"type": text}}],
        "responses": {text: {"description": text}},
    }
    document = {"info": {"title": text, "version": text}, "paths": {text: {"post": operation}}}
    page = api_page(document).decode()
    assert text not in page.replace("</style></head>", "")
