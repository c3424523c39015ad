"""`sluice keys` as people use it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from services.gateway.admission.keys import KeyRing, read


def sluice(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sluice.cli.main", "keys", *arguments], capture_output=True, text=True, timeout=60
    )


def test_a_key_from_its_making_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    made = sluice("create", "team a", "--file", str(file), "--requests-per-minute", "60", "--model", "m")
    assert made.returncode == 0, made.stderr
    shown = made.stdout.strip()
    (record,) = read(file)
    assert (record.name, record.requests_per_minute, record.models) == ("team a", 60, ("m",))
    assert KeyRing(read(file)).find(shown) == record
    listed = sluice("list", "--file", str(file))
    assert record.id in listed.stdout
    assert shown not in listed.stdout
    assert sluice("revoke", record.id, "--file", str(file)).returncode == 0
    assert KeyRing(read(file)).find(shown) is None


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    for arguments in (
        ("create", "x", "--file", str(file), "--priority", "99"),
        ("revoke", "0" * 12, "--file", str(file)),
        ("list", "--file", str(file)),
        ("create", "x"),
        ("create", "x", "--file", str(tmp_path)),
        ("create", "x", "--file", "."),
        ("revoke", "x", "--file", "/"),
    ):
        refused = sluice(*arguments)
        assert refused.returncode == 2
        assert refused.stderr.count("\n") == 1
        assert refused.stderr.startswith("sluice: ")


def test_without_a_command_its_help_is_shown() -> None:
    shown = sluice()
    assert shown.returncode == 0
    assert shown.stdout.startswith("Usage: ")
    assert "revoke" in shown.stdout
