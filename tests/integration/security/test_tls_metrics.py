"""The metrics endpoint behind TLS: as strict as the gRPC port, and a slow client delays no other."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from services.common.base.errors import SluiceError
from services.common.observability.scrape_server import ScrapeEndpoint
from services.common.security import file_watcher as watched
from services.common.security.tls import metrics_context
from services.common.settings.service import TlsSettings
from tests.support.data.authority import Authority


@contextmanager
def endpoint(settings: TlsSettings) -> Iterator[int]:
    running = ScrapeEndpoint("127.0.0.1:0", metrics_context(settings))
    running.start()
    try:
        yield running.port
    finally:
        running.close()


def scrape(port: int, trusted: Authority, mine: TlsSettings | None = None) -> str:
    context = ssl.create_default_context(cafile=str(trusted.file))
    if mine is not None and mine.tls_cert is not None:
        context.load_cert_chain(mine.tls_cert, mine.tls_key)
    with httpx.Client(verify=context, trust_env=False, timeout=20) as http:
        return http.get(f"https://127.0.0.1:{port}/metrics").raise_for_status().text


def test_only_the_authoritys_clients_may_scrape(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    with endpoint(ours.issue("router").model_copy(update={"tls_require_client_cert": True})) as port:
        assert "python_info" in scrape(port, ours, ours.issue("prometheus"))
        for mine in (None, ours.issue("late", expired=True), theirs.issue("stranger")):
            with pytest.raises(httpx.TransportError):
                scrape(port, ours, mine)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False)
        assert "python_info" in scrape(port, ours, ours.issue("prometheus"))
    assert "Traceback" not in capfd.readouterr().err


def test_who_never_finishes_the_handshake_holds_nobody_up(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    with endpoint(ours.issue("router")) as port:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        assert "python_info" in scrape(port, ours)
        for one in idle:
            one.close()


def test_a_new_certificate_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "CHECK_EVERY_S", 0.0)
    ours = Authority(tmp_path)
    with endpoint(ours.issue("router")) as port:
        before = ssl.get_server_certificate(("127.0.0.1", port), ca_certs=str(ours.file), timeout=20)
        ours.issue("router")
        after = ssl.get_server_certificate(("127.0.0.1", port), ca_certs=str(ours.file), timeout=20)
        assert before != after
        assert after.split() == (tmp_path / "router.pem").read_text().split()


def test_without_a_certificate_it_is_one_sentence() -> None:
    with pytest.raises(SluiceError, match="metrics-tls requires tls-cert"):
        metrics_context(TlsSettings())
