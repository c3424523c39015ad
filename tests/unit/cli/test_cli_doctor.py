"""What the doctor makes of what it sees."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from sluice.cli import certs
from sluice.cli.doctor import certificates as certificates
from sluice.cli.doctor import redis as redis_checks
from sluice.cli.doctor.finding import Finding, State, clock
from sluice.cli.live.endpoint import Endpoint
from sluice.cli.main import main
from sluice.cli.trust import Trust

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def certificate(begins: datetime, ends: datetime) -> x509.Certificate:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), begins, ends)
    return builder.sign(key, SHA256())


@pytest.mark.parametrize(
    ("begins", "ends", "state", "said"),
    [
        (NOW - DAY, NOW + 60 * DAY, State.OK, "59 days"),
        (NOW - DAY, NOW + 3 * DAY, State.WARN, "2 days"),
        (NOW - 9 * DAY, NOW - DAY, State.FAIL, "expired"),
        (NOW + DAY, NOW + 9 * DAY, State.FAIL, "not valid before"),
    ],
)
def test_certificates(begins: datetime, ends: datetime, state: State, said: str) -> None:
    found = certificates.validity("certificate", certificate(begins, ends), "Renew it")
    assert found.state is state
    assert said in found.found
    assert bool(found.advice) == (state is not State.OK)


def test_every_certificate_of_the_folder_is_looked_at(tmp_path: Path) -> None:
    list(certs.make(tmp_path, certs.Options(names=("router",), hosts=(), days=5)))
    (tmp_path / "broken.pem").write_text("no certificate")
    found = {one.check: one for one in certificates.examine(Endpoint(trust=Trust(tmp_path)))}
    assert found["certificate router.pem"].state is State.WARN
    assert found["certificate broken.pem"].state is State.FAIL
    assert "--renew" in found["certificate router.pem"].advice


def test_without_encryption_there_is_nothing_to_look_at() -> None:
    assert [one.state for one in certificates.examine(Endpoint())] == [State.SKIPPED]


@pytest.mark.parametrize(
    ("ahead_s", "state"), [(0.2, State.OK), (-0.9, State.OK), (5.0, State.WARN), (-5.0, State.WARN), (100, State.FAIL)]
)
def test_clocks(ahead_s: float, state: State) -> None:
    assert clock("clock", ahead_s).state is state


@pytest.mark.parametrize(
    ("url", "said"),
    [("redis://127.0.0.1:1/0", "cannot be reached"), ("http://redis", "not a Redis URL")],
)
async def test_a_redis_that_cannot_be_asked(url: str, said: str) -> None:
    (found,) = await redis_checks.examine(url)
    assert found.state is State.FAIL
    assert said in found.found
    assert found.advice


async def test_a_redis_that_nobody_named_is_left_out() -> None:
    assert [one.state for one in await redis_checks.examine("")] == [State.SKIPPED]


def test_nothing_there_is_a_finding_with_advice_and_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = ("--gateway", "http://127.0.0.1:1", "--router", "127.0.0.1:1")
    monkeypatch.setattr("sys.argv", ["sluice", "doctor", *nowhere, "--json"])
    monkeypatch.delenv("SLUICE_ROUTER_REDIS_URL", raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    said = json.loads(capsys.readouterr().out)
    checks = {check["check"]: Finding(**check) for check in said["checks"]}
    assert ended.value.code == 1
    assert not said["ok"]
    assert checks["gateway"].state == checks["router"].state == State.FAIL
    assert "sluice up" in checks["gateway"].advice
