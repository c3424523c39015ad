"""Hostile clients at the metrics endpoint of a process: idle connections, and requests that trickle."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from services.common.base import budgets
from services.common.observability import scrape_server
from services.common.observability.scrape_server import ScrapeEndpoint

WAIT_S = 30.0


@pytest.fixture
def endpoint() -> Iterator[ScrapeEndpoint]:
    served = ScrapeEndpoint("127.0.0.1:0")
    served.start()
    yield served
    served.close()


def status(endpoint: ScrapeEndpoint) -> int:
    """Returns the status of a scrape; 0 if its connection is closed instead."""
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=WAIT_S)
    try:
        connection.request("GET", "/metrics", headers={"host": f"127.0.0.1:{endpoint.port}"})
        return connection.getresponse().status
    except (ConnectionError, http.client.BadStatusLine):
        return 0
    finally:
        connection.close()


def test_idle_connections_to_metrics_are_bounded(endpoint: ScrapeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    monkeypatch.setattr(budgets, "on_refused", refused.append)
    with ExitStack() as idle:
        for number in range(100):
            client = idle.enter_context(socket.create_connection(("127.0.0.1", endpoint.port), timeout=WAIT_S))
            if number >= 32:
                assert client.recv(1) == b"", "it is closed"
        assert refused == ["scrape_connections"] * 68
        assert status(endpoint) == 0
    until = time.monotonic() + WAIT_S
    while status(endpoint) != 200 and time.monotonic() < until:
        time.sleep(0.05)
    assert status(endpoint) == 200


def test_request_for_metrics_that_trickles_is_ended_in_time(
    endpoint: ScrapeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape_server, "LIFETIME_S", 0.5, raising=False)
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=0.1) as client:
        until = time.monotonic() + 5
        ended = False
        while not ended and time.monotonic() < until:
            try:
                client.sendall(b"G")
                ended = client.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                ended = True
    assert ended
