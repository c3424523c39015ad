"""`sluice keys` as people use it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from services.gateway.admission.keys import KeyRing, read
from services.gateway.admission.scopes import Scope
from sluice.cli.main import main


def sluice(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `sluice keys` in this process."""
    output, errors, command = io.StringIO(), io.StringIO(), ["sluice", "keys", *arguments]
    caught = pytest.raises(SystemExit)
    with redirect_stdout(output), redirect_stderr(errors), patch.object(sys, "argv", command), caught as ended:
        main()
    return subprocess.CompletedProcess(command, int(ended.value.code or 0), output.getvalue(), errors.getvalue())


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


def test_a_key_is_changed_in_place_and_keeps_its_secret(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    fields = ("--scope", "infer,priority", "--tenant", "acme", "--model", "m")
    made = sluice("create", "team a", "--file", str(file), *fields)
    shown = made.stdout.strip()
    (record,) = read(file)
    assert (record.scopes, record.tenant) == (frozenset({Scope.INFER, Scope.PRIORITY}), "acme")
    changes = ("--scope", "infer", "--scope", "operate", "--requests-per-minute", "5")
    changed = sluice("set", record.id, "--file", str(file), *changes)
    assert changed.returncode == 0, changed.stderr
    (after,) = read(file)
    assert after == replace(record, scopes=frozenset({Scope.INFER, Scope.OPERATE}), requests_per_minute=5)
    assert KeyRing(read(file)).find(shown) == after
    assert sluice("set", shown, "--file", str(file), "--tenant", "", "--any-model").returncode == 0
    (last,) = read(file)
    assert (last.owner, last.models) == (record.id, ())


def test_a_list_in_a_pipe_folds_nothing_and_json_holds_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    name = "the team that has a name as long as names may be " * 4
    scopes = ["infer", "priority", "pin-worker", "template", "operate"]
    assert sluice("create", name.strip(), "--file", str(file), "--scope", ",".join(scopes)).returncode == 0
    (record,) = read(file)
    (row,) = [line for line in sluice("list", "--file", str(file)).stdout.splitlines() if record.id in line]
    assert name.strip() in row
    assert ", ".join(scopes) in row
    (told,) = json.loads(sluice("list", "--file", str(file), "--json").stdout)
    assert (told["id"], told["scopes"], told["tenant"]) == (record.id, scopes, record.id)
    assert record.hash not in json.dumps(told)


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    file, made = tmp_path / "keys.json", tmp_path / "made.json"
    assert sluice("create", "x", "--file", str(made)).returncode == 0
    for arguments in (
        ("create", "x", "--file", str(file), "--priority", "99"),
        ("revoke", "0" * 12, "--file", str(file)),
        ("list", "--file", str(file)),
        ("create", "x"),
        ("create", "x", "--file", str(tmp_path)),
        ("create", "x", "--file", "."),
        ("revoke", "x", "--file", "/"),
        ("create", "x", "--file", str(file), "--scope", "everything"),
        ("create", "x", "--file", str(file), "--tenant", "a b"),
        ("set", "0" * 12, "--file", str(made), "--scope", "infer"),
        ("set", read(made)[0].id, "--file", str(made)),
        ("set", read(made)[0].id, "--file", str(made), "--weight", "0"),
        ("set", read(made)[0].id, "--file", str(made), "--model", "m", "--any-model"),
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
