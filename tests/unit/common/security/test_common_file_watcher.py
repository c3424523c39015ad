"""Files that are replaced while they are watched, and certificates that expire."""

from __future__ import annotations

import os
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.common.security import file_watcher as watched
from services.common.security.file_watcher import WatchedFiles
from services.common.security.tls import Identity, refusal, server_credentials
from services.common.settings.service import TlsSettings
from sluice.cli.certs import Options, make
from tests.support.data.authority import Authority


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    monkeypatch.setattr(watched, "CHECK_EVERY_S", 0.0)


def pair(folder: Path) -> WatchedFiles[str]:
    """Two files that must say the same, as a certificate and its key must belong together."""

    def load() -> str:
        try:
            left, right = ((folder / name).read_text() for name in ("left", "right"))
        except OSError as error:
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, f"It cannot be read: {error.strerror}.") from error
        if left != right:
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, "They do not fit.")
        return left

    return WatchedFiles("the pair", [folder / "left", folder / "right"], load)


def write(path: Path, text: str) -> None:
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text)
    os.replace(fresh, path)


def test_a_folder_behind_a_link_is_swapped_in_one_step(tmp_path: Path) -> None:
    """As Kubernetes replaces the files of a Secret."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for side in ("left", "right"):
            (tmp_path / name / side).write_text(name)
    link = tmp_path / "now"
    link.symlink_to(tmp_path / "one")
    files = pair(link)
    assert files.value == "one"
    (tmp_path / "fresh").symlink_to(tmp_path / "two")
    os.replace(tmp_path / "fresh", link)
    assert files.value == "two"
    assert files.generation == 2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.sampled_from(["left", "right"]), st.sampled_from(["a", "b", "c", ""])), max_size=12))
def test_the_value_is_always_one_that_fitted(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("pair")
    for side in ("left", "right"):
        write(folder / side, "a")
    files, expected = pair(folder), "a"
    now: dict[str, str | None] = {"left": "a", "right": "a"}
    for side, text in steps:
        if text:
            write(folder / side, text)
        else:
            (folder / side).unlink(missing_ok=True)
        now[side] = text or None
        if now["left"] == now["right"] and now["left"] is not None:
            expected = now["left"]
        assert files.value == expected


def test_invalid_file_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for side in ("left", "right"):
        write(tmp_path / side, "a")
    files = pair(tmp_path)
    write(tmp_path / "left", "b")
    for _ in range(20):
        assert files.value == "a"
    assert [record.message for record in caplog.records] == ["They do not fit. The previous content stays in use."]
    (tmp_path / "left").unlink()
    for _ in range(20):
        assert files.value == "a"
    assert len(caplog.records) == 2


def test_many_threads_see_whole_values(tmp_path: Path) -> None:
    for side in ("left", "right"):
        write(tmp_path / side, "0")
    files = pair(tmp_path)
    with ThreadPoolExecutor(8) as readers:
        running = [readers.submit(lambda: [files.value for _ in range(300)]) for _ in range(8)]
        for number in range(1, 40):
            for side in ("left", "right"):
                write(tmp_path / side, str(number))
        seen = [[int(value) for value in each.result()] for each in running]
    assert all(each == sorted(each) for each in seen)
    assert files.value == "39"


def served(trust: TlsSettings) -> ssl.SSLContext:
    return Identity(trust.tls_cert, trust.tls_key, trust.tls_ca).context(require_client_cert=False)


def test_expired_certificate_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    late = Authority(tmp_path).issue("late", expired=True)
    assert late.tls_cert is not None
    assert server_credentials(late) is not None
    assert f"tls-cert {late.tls_cert} will be rejected by all peers: certificate has expired" in caplog.text
    assert refusal(served(late), late.tls_cert) == "certificate has expired"


def test_valid_certificate_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path / "made", Options())
    ours = TlsSettings(
        tls_cert=tmp_path / "made/router.pem", tls_key=tmp_path / "made/router.key", tls_ca=tmp_path / "made/ca.pem"
    )
    for trust in (ours, Authority(tmp_path).issue("router")):
        assert trust.tls_cert is not None
        assert refusal(served(trust), trust.tls_cert) == ""
        assert server_credentials(trust) is not None
    assert caplog.text == ""
