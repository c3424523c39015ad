"""A certificate that nobody will take is said when it is read, at the start and after a rotation."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from services.common.security.tls import Identity, refusal, server_credentials
from services.common.settings import TlsSettings
from sluice.cli.certs import Options, make
from tests.support.data.authority import Authority


def served(trust: TlsSettings) -> ssl.SSLContext:
    return Identity(trust.tls_cert, trust.tls_key, trust.tls_ca).context(require_client_cert=False)


def test_who_has_expired_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    late = Authority(tmp_path).issue("late", expired=True)
    assert late.tls_cert is not None
    assert server_credentials(late) is not None
    assert f"tls-cert {late.tls_cert} will be rejected by all peers: certificate has expired" in caplog.text
    assert refusal(served(late), late.tls_cert) == "certificate has expired"


def test_who_is_well_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path / "made", Options())
    ours = TlsSettings(
        tls_cert=tmp_path / "made/router.pem", tls_key=tmp_path / "made/router.key", tls_ca=tmp_path / "made/ca.pem"
    )
    for trust in (ours, Authority(tmp_path).issue("router")):
        assert trust.tls_cert is not None
        assert refusal(served(trust), trust.tls_cert) == ""
        assert server_credentials(trust) is not None
    assert caplog.text == ""
