"""A service that is given wrong certificates or tokens says so in one sentence and ends with 1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.data.authority import Authority


def said(service: str, *flags: str) -> str:
    """The only line a service writes before it ends with 1."""
    ended = subprocess.run(
        [sys.executable, "-m", f"services.{service}", "--listen", "127.0.0.1:0", *flags],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1, ended.stderr
    (line,) = ended.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("service", "flags", "says"),
    [
        ("router", ("--tls-cert", "a.pem", "--tls-key", "b.key"), "must be a certificate and its unencrypted key"),
        ("gateway", ("--https-cert", "a.pem", "--https-key", "b.key"), "must be a certificate and its unencrypted key"),
        ("router", ("--tokens-file", "none"), "cannot be read: No such file"),
        ("gateway", ("--audit-log", "none/audit"), "The audit log"),
    ],
)
def test_one_sentence_and_exit_code_1(tmp_path: Path, service: str, flags: tuple[str, ...], says: str) -> None:
    authority = Authority(tmp_path)
    authority.issue("a")
    authority.issue("b")
    line = said(service, *(flag if flag.startswith("--") else str(tmp_path / flag) for flag in flags))
    assert says in line
    assert "ERROR" in line
