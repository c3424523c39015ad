"""`/health` beside the metrics: 200 while the process serves, 503 with what keeps it while it does not."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from services.common.observability import scrape_server as scraping
from services.common.observability.scrape_server import ScrapeEndpoint


@pytest.fixture
def url() -> Iterator[str]:
    endpoint = ScrapeEndpoint("127.0.0.1:0")
    endpoint.start()
    yield f"http://127.0.0.1:{endpoint.port}"
    endpoint.close()


def asked(url: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_it_follows_the_servers_health(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "health", scraping.health_of_server)
    monkeypatch.setattr(scraping, "serving", False)
    assert asked(url) == (503, {"status": "waiting"})
    monkeypatch.setattr(scraping, "serving", True)
    assert asked(url) == (200, {"status": "ok"})


def test_a_service_says_more(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"status": "waiting", "phase": "loading weights", "phase_share": 0.25}
    monkeypatch.setattr(scraping, "health", lambda: said)
    assert asked(url) == (503, said)


def test_metrics_are_at_every_other_path(url: str) -> None:
    for path in ("/metrics", "/"):
        with urllib.request.urlopen(f"{url}{path}", timeout=20) as answer:
            assert b"# TYPE" in answer.read()
