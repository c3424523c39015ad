"""What the doctor makes of what it sees."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from sluice import __version__
from sluice.cli import certs
from sluice.cli.doctor import certificates as certificates
from sluice.cli.doctor import redis as redis_checks
from sluice.cli.doctor import servers as server_checks
from sluice.cli.doctor.checks import _services
from sluice.cli.doctor.finding import Finding, FindingState, clock
from sluice.cli.doctor.servers import Server
from sluice.cli.live.client import Running, Seen
from sluice.cli.live.endpoint import Endpoint
from sluice.cli.trust import Trust
from tests.unit.cli.conftest import Sluice

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def certificate(begins: datetime, ends: datetime) -> x509.Certificate:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), begins, ends)
    return builder.sign(key, SHA256())


@pytest.mark.parametrize(
    ("begins", "ends", "state", "message"),
    [
        (NOW - DAY, NOW + 60 * DAY, FindingState.OK, "59 days"),
        (NOW - DAY, NOW + 3 * DAY, FindingState.WARN, "2 days"),
        (NOW - 9 * DAY, NOW - DAY, FindingState.FAIL, "expired"),
        (NOW + DAY, NOW + 9 * DAY, FindingState.FAIL, "not valid before"),
    ],
)
def test_certificates(begins: datetime, ends: datetime, state: FindingState, message: str) -> None:
    found = certificates.validity("certificate", certificate(begins, ends), "Renew it")
    assert found.state is state
    assert message in found.found
    assert bool(found.advice) == (state is not FindingState.OK)


def test_every_certificate_of_the_folder_is_looked_at(tmp_path: Path) -> None:
    list(certs.make(tmp_path, certs.Options(names=("router",), hosts=(), days=5)))
    (tmp_path / "broken.pem").write_text("no certificate")
    found = {one.check: one for one in certificates.examine(Endpoint(trust=Trust(tmp_path)))}
    assert found["certificate router.pem"].state is FindingState.WARN
    assert found["certificate broken.pem"].state is FindingState.FAIL
    assert "--renew" in found["certificate router.pem"].advice


def test_without_encryption_there_is_nothing_to_look_at() -> None:
    assert [one.state for one in certificates.examine(Endpoint())] == [FindingState.SKIPPED]


@pytest.mark.parametrize(
    ("ahead_s", "state"),
    [
        (0.2, FindingState.OK),
        (-0.9, FindingState.OK),
        (5.0, FindingState.WARN),
        (-5.0, FindingState.WARN),
        (100, FindingState.FAIL),
    ],
)
def test_clocks(ahead_s: float, state: FindingState) -> None:
    assert clock("clock", ahead_s).state is state


@pytest.mark.parametrize(
    ("url", "message"),
    [("redis://127.0.0.1:1/0", "cannot be reached"), ("http://redis", "not a Redis URL")],
)
async def test_a_redis_that_cannot_be_asked(url: str, message: str) -> None:
    (found,) = await redis_checks.examine(url)
    assert found.state is FindingState.FAIL
    assert message in found.found
    assert found.advice


async def test_unset_redis_url_is_not_checked() -> None:
    assert [one.state for one in await redis_checks.examine("")] == [FindingState.SKIPPED]


def test_nothing_there_is_a_finding_with_advice_and_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, sluice: Sluice, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = ("--gateway", "http://127.0.0.1:1", "--router", "127.0.0.1:1")
    monkeypatch.delenv("SLUICE_ROUTER_REDIS_URL", raising=False)
    assert sluice("doctor", *nowhere, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    checks = {check["check"]: Finding(**check) for check in report["checks"]}
    assert not report["ok"]
    assert checks["gateway"].state == checks["router"].state == FindingState.FAIL
    assert "sluice up" in checks["gateway"].advice


WELL = Seen("SERVING", __version__, 0.01)


class Asked:
    """Stands for a running suite: every server says what is given."""

    def __init__(self, said: dict[str, Seen]) -> None:
        self.endpoint = Endpoint()
        self._said = said

    async def status_of(self, address: str) -> Seen:
        return self._said[address]


async def examined(message: dict[str, Seen], draining: bool = False) -> list[Finding]:
    servers = [Server(f"s{number}", address, draining) for number, address in enumerate(message)]
    return await server_checks.examine(cast(Running, Asked(message)), servers)


async def test_servers_that_are_well_are_one_finding_each_and_one_for_their_clocks() -> None:
    found = await examined({"h:1": WELL, "h:2": WELL})
    assert [one.check for one in found] == ["s0 h:1", "s1 h:2", "clocks"]
    assert {one.state for one in found} == {FindingState.OK}
    assert "2 services" in found[-1].found


@pytest.mark.parametrize(
    ("seen", "state", "message"),
    [
        (Seen("UNREACHABLE", reason="refused."), FindingState.WARN, "cannot be reached from this machine: refused."),
        (Seen("NOT_SERVING", __version__, 0), FindingState.FAIL, "NOT_SERVING"),
        (Seen("UNAUTHENTICATED"), FindingState.FAIL, "UNAUTHENTICATED"),
        (Seen("SERVING", "9.9", 0), FindingState.WARN, "version 9.9"),
        (Seen("SERVING"), FindingState.WARN, "version unknown"),
    ],
)
async def test_a_server_that_is_not_well(seen: Seen, state: FindingState, message: str) -> None:
    found = (await examined({"h:1": seen}))[0]
    assert found.state is state
    assert message in found.found
    assert found.advice


async def test_a_clock_that_is_wrong_is_named() -> None:
    found = await examined({"h:1": WELL, "h:2": Seen("SERVING", __version__, -90.0)})
    assert [(one.check, one.state) for one in found[2:]] == [("clock of s1 h:2", FindingState.FAIL)]
    assert "90.0 s behind" in found[2].found
    assert "NTP" in found[2].advice


async def test_a_worker_that_drains_is_no_fault() -> None:
    (found, _) = await examined({"h:1": Seen("NOT_SERVING", __version__, 0.0)}, draining=True)
    assert (found.state, found.found) == (FindingState.WARN, "is draining")


def test_addresses_without_a_server_are_named() -> None:
    node = {"serving": ["h:1"], "away": ["h:2", "typo:50051"], "troubled": 0}
    state = {"version": __version__, "unix_ms": 0, "answered_unix_ms": 0, "nodes": {"router": node}, "degraded": {}}
    found, servers = _services(state)
    assert servers == [Server("router", "h:1")]
    wrong = [one for one in found if one.advice]
    assert [one.check for one in wrong] == ["router h:2", "router typo:50051"]
    assert {one.state for one in wrong} == {FindingState.WARN}
