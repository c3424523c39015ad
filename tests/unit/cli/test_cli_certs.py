"""`sluice certs`: what it makes, what it leaves alone, and what it says."""

from __future__ import annotations

import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtensionOID

from services.common.security.tls import channel_credentials, server_credentials
from services.common.settings.service import TlsSettings
from sluice.cli.certs import NAMES, Options, make
from sluice.cli.errors import BadFlag
from sluice.cli.main import main
from sluice.cli.up import tls as tls_flags
from sluice.cli.up.options import Options as UpOptions
from sluice.cli.up.plan import plan, secured
from tests.support.data.authority import Authority

IDENTITIES = {name: f"spiffe://sluice/{name}" for name in tls_flags.SERVICES} | {"client": "spiffe://sluice/operator"}


def certificate(folder: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())


def names_in(found: x509.Certificate) -> set[str]:
    names = found.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME).value
    assert isinstance(names, x509.SubjectAlternativeName)
    return {str(one.value) for one in names}


def test_every_service_gets_a_certificate_that_only_its_owner_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    said = make(folder, Options(hosts=("gateway.example", "192.0.2.7"), days=7))
    assert len(said) == 1 + len(NAMES)
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in NAMES:
        found = certificate(folder, name)
        hosts = {name, "localhost", "127.0.0.1", "::1", "gateway.example", "192.0.2.7"}
        assert names_in(found) == hosts | ({IDENTITIES[name]} if name in IDENTITIES else set())
        assert timedelta(days=6) < found.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=7)
        found.verify_directly_issued_by(certificate(folder, "ca"))
        settings = TlsSettings(
            tls_cert=folder / f"{name}.pem", tls_key=folder / f"{name}.key", tls_ca=folder / "ca.pem"
        )
        assert server_credentials(settings) is not None
        assert channel_credentials(settings) is not None


def test_a_worker_can_have_a_certificate_that_names_it_alone(tmp_path: Path) -> None:
    said = make(tmp_path, Options(names=(), workers=("gpu-0",), trust_domain="example.org"))
    assert any("for spiffe://example.org/worker/gpu-0" in sentence for sentence in said)
    assert {"worker", "gpu-0", "spiffe://example.org/worker/gpu-0"} <= names_in(certificate(tmp_path, "worker-gpu-0"))
    for options in (Options(workers=("a/b",)), Options(workers=("",)), Options(trust_domain="Example Org")):
        with pytest.raises(BadFlag):
            make(tmp_path, options)


def test_a_suite_does_not_start_with_certificates_that_name_no_caller(tmp_path: Path) -> None:
    make(tmp_path, Options())
    assert tls_flags.problem(tmp_path) == ""
    unnamed = Authority(tmp_path / "unnamed").issue("router", named=False)
    for path, name in ((unnamed.tls_cert, "router.pem"), (unnamed.tls_key, "router.key")):
        assert path is not None
        (tmp_path / name).write_bytes(path.read_bytes())
    assert "router.pem does not name the service (spiffe://sluice/router)" in tls_flags.problem(tmp_path)
    assert "--renew" in tls_flags.problem(tmp_path)


def test_openssl_accepts_the_chain_for_servers_and_clients(tmp_path: Path) -> None:
    make(tmp_path, Options(names=("router",)))
    for purpose in ("sslserver", "sslclient"):
        command = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", str(tmp_path / "ca.pem")]
        subprocess.run([*command, str(tmp_path / "router.pem")], check=True, capture_output=True)


def test_what_is_there_stays_until_it_is_renewed_by_the_same_authority(tmp_path: Path) -> None:
    make(tmp_path, Options())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    make(tmp_path, Options())
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    make(tmp_path, Options(names=("worker",), renew=True))
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"worker.pem", "worker.key"}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "ca.key").unlink(), "without ca.key"),
        (lambda folder: (folder / "ca.key").write_text("junk"), "not an authority"),
        (lambda folder: (folder / "ca.key").write_bytes((folder / "router.key").read_bytes()), "is not the key"),
        (lambda folder: (folder / "ca.pem").write_text("junk"), "not an authority"),
    ],
)
def test_an_authority_that_cannot_issue_is_one_sentence(tmp_path: Path, spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path, Options())
    spoil(tmp_path)
    with pytest.raises(BadFlag, match=message) as refused:
        make(tmp_path, Options(renew=True))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("options", [Options(names=("../x",)), Options(names=("ca",)), Options(hosts=("bücher.de",))])
def test_names_that_cannot_be_are_refused(tmp_path: Path, options: Options) -> None:
    with pytest.raises(BadFlag):
        make(tmp_path, options)
    assert list(tmp_path.parent.glob("x*")) == []


def test_a_folder_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadFlag, match="file"):
        make(tmp_path / "file", Options())


def test_up_gives_every_process_a_separate_certificate(tmp_path: Path) -> None:
    make(tmp_path, Options())
    numbers = iter(range(20_000, 21_000))
    options = UpOptions(base_grpc_port=0, port=0, tls=tmp_path)
    processes = secured(plan(options, lambda: next(numbers)), tmp_path)
    for one in processes:
        flags = dict(zip(one.arguments, one.arguments[1:], strict=False))
        assert flags["--tls-cert"] == str(tmp_path / f"{one.kind}.pem")
        assert flags["--tls-key"] == str(tmp_path / f"{one.kind}.key")
        assert flags["--tls-ca"] == str(tmp_path / "ca.pem")
        assert ("--https-cert" in flags) is (one.kind == "gateway")
        assert "--tls-require-client-cert" in one.arguments
        assert one.tls == tmp_path


def test_up_names_the_missing_or_invalid_certificate(tmp_path: Path) -> None:
    with pytest.raises(BadFlag, match=r"gateway\.pem cannot be read.*Create the certificates with `sluice certs"):
        plan(UpOptions(tls=tmp_path), lambda: 0)
    make(tmp_path, Options())
    (tmp_path / "worker.key").write_bytes((tmp_path / "router.key").read_bytes())
    with pytest.raises(BadFlag, match=r"worker\.pem and tls-key .* must be a certificate and its unencrypted key"):
        plan(UpOptions(tls=tmp_path), lambda: 0)


def test_certs_command_lists_new_files_and_errors_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sluice", "certs", str(tmp_path / "made"), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    code, out, err = run("--name", "router", "--host", "router.example", "--days", "3")
    assert (code, err) == (0, "")
    assert out.count("\n") == 2
    assert "router.example" in names_in(certificate(tmp_path / "made", "router"))
    code, out, err = run("--name", "ca")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("sluice: 'ca' cannot be the name")
    assert run("--days", "0")[0] == 2


def test_an_authority_whose_certificate_is_elsewhere_keeps_its_key(tmp_path: Path) -> None:
    make(tmp_path, Options(names=("router",)))
    key = (tmp_path / "ca.key").read_bytes()
    (tmp_path / "ca.pem").unlink()
    with pytest.raises(BadFlag, match=r"ca\.key without"):
        make(tmp_path, Options(names=("router",)))
    assert (tmp_path / "ca.key").read_bytes() == key


def test_a_certificate_whose_key_is_gone_is_made_anew(tmp_path: Path) -> None:
    make(tmp_path, Options(names=("router",)))
    (tmp_path / "router.key").unlink()
    (said,) = make(tmp_path, Options(names=("router",)))
    assert said.startswith("created")
    settings = TlsSettings(tls_cert=tmp_path / "router.pem", tls_key=tmp_path / "router.key")
    assert server_credentials(settings) is not None


@pytest.mark.parametrize("host", ["a.example,b.example", "a b", "", "h:443", "https://h", "-", "x" * 300])
def test_what_is_no_host_name_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(BadFlag, match="--host"):
        make(tmp_path, Options(names=("router",), hosts=(host,)))


def test_wildcards_and_names_of_containers_are_host_names(tmp_path: Path) -> None:
    hosts = ("*.workers.example", "router_1", "router.sluice.svc.cluster.local", "x")
    make(tmp_path, Options(names=("router",), hosts=hosts))
    assert set(hosts) <= names_in(certificate(tmp_path, "router"))
