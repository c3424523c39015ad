"""A collector that hangs and a metrics port that is taken: a clear word, and requests go on."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from services.common.net.ports import free_port
from tests.support.servers.collector import env_of
from tests.support.servers.suite import Suite

REQUESTS = 40


@contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    """A server that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen(64)
        yield listener, f"127.0.0.1:{listener.getsockname()[1]}"


def awaited(what: str, reached: Callable[[], bool], within_s: float = 40) -> None:
    deadline = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_requests_go_on_without_a_collector_and_without_a_port() -> None:
    with listening() as (_, collector), listening() as (taken, address):
        env = {**env_of(f"http://{collector}"), "SLUICE_ROUTER_METRICS_LISTEN": address}
        with Suite("--workers", "1", "--speedup", "20", env=env) as suite:

            def said(text: str, service: str) -> bool:
                return any(text in line for line in list(suite.output) if line.startswith(service))

            awaited("the word about the port", lambda: said(f"no metrics: cannot listen on {address}", "router"))
            with httpx.Client(base_url=suite.url, timeout=60) as client:
                for index in range(REQUESTS):
                    body = {"model": "tekken", "messages": [{"role": "user", "content": f"{index}"}], "max_tokens": 5}
                    assert client.post("/v1/chat/completions", json=body).status_code == 200
                awaited("the word about the collector", lambda: said("does not accept spans", "gateway"))
                lost = client.get("/metrics").text
            assert 'sluice_process_spans_total{outcome="failed",service="gateway"}' in lost
            taken.close()
            awaited("the endpoint", lambda: said(f"metrics are served  address={address}", "router"))
            assert httpx.get(f"http://{address}/metrics").status_code == 200
            assert suite.stop() == 0
