"""The command as its user meets it: what is printed, and the exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from services.worker.settings import WorkerSettings
from sluice.cli import main, worker
from sluice.cli.commands import app
from sluice.cli.up import supervisor as supervisor
from sluice.cli.up.plan import Process
from sluice.cli.up.progress import View
from tests.unit.cli.conftest import Sluice


@pytest.mark.parametrize(
    "arguments",
    [
        ("up", "--nope"),
        ("up", "--workers", "-1"),
        ("up", "--workers", "many"),
        ("up", "--port", "70000"),
        ("up", "--host", ""),
        ("up", "--engine", "steam"),
        ("up", "--processor", "word"),
        ("up", "--log-level", "loud"),
        ("up", "--model", "./not-there"),
        ("up", "--routers", "2"),
        ("up", "surplus"),
        ("down",),
    ],
)
def test_bad_flags_are_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, sluice: Sluice, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLUICE_ROUTER_REDIS_URL", raising=False)
    assert sluice(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"sluice: [^\n]+\.\n", printed.err)
    assert "Traceback" not in printed.err


def test_version(sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    assert sluice("version") == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", capsys.readouterr().out)


TLS_FLAGS = {"--tls", "--tls-ca", "--tls-cert", "--tls-key"}


def flags_of(command: str) -> set[str]:
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    return {option for one in found.params for option in one.opts}


@pytest.mark.parametrize("command", ["top", "route", "workers", "doctor", "conformance"])
def test_commands_that_reach_a_suite_have_the_same_tls_flags(command: str) -> None:
    assert {flag for flag in flags_of(command) if "tls" in flag} == TLS_FLAGS


def test_suite_and_worker_take_the_folder_of_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sluice: Sluice, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--tls" in flags_of("up")
    assert sluice("worker", "--tls", str(tmp_path)) == 2
    assert f"--tls {tmp_path} has no worker.pem; create the certificates with `sluice certs" in capsys.readouterr().err
    assert sluice("certs", str(tmp_path)) == 0
    loaded: list[WorkerSettings] = []
    monkeypatch.setattr(worker, "run", lambda name, settings, serve: loaded.append(settings))
    for given in (("--tls", str(tmp_path)), (f"--tls={tmp_path}",)):
        worker.run_worker(["--model", "m=/x", *given, "--", "--tls", "of-the-engine"])
    for settings in loaded:
        assert settings.tls_cert == tmp_path / "worker.pem"
        assert settings.tls_key == tmp_path / "worker.key"
        assert settings.tls_ca == tmp_path / "ca.pem"
        assert settings.tls_require_client_cert
        assert settings.engine_flags == ("--tls", "of-the-engine")
    assert len(loaded) == 2


@pytest.mark.parametrize("arguments", [(), ("--help",), ("up", "--help")])
def test_help_is_plain_text(arguments: tuple[str, ...], sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    assert sluice(*arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Usage: ")
    assert "╭" not in printed


def test_redis_url_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, sluice: Sluice) -> None:
    monkeypatch.setenv("SLUICE_ROUTER_REDIS_URL", "redis://localhost:1/0")
    started: list[Process] = []

    def start(processes: list[Process], view: View, model: str, restart: bool) -> int:
        started.extend(processes)
        return 0

    monkeypatch.setattr(supervisor, "run", start)
    assert sluice("up", "--routers", "2", "--port", "0", "--base-grpc-port", "0") == 0
    routers = [process for process in started if process.kind == "router"]
    assert [dict(router.env) for router in routers] == [{"SLUICE_ROUTER_REDIS_URL": "redis://localhost:1/0"}] * 2


def started_with(typer: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`sluice up`, where importing typer does this."""
    (folder / "typer.py").write_text(typer)
    path = os.pathsep.join([str(folder), str(Path(main.__file__).parents[2])])
    command = [sys.executable, "-P", "-m", "sluice.cli.main", "up"]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60)


def test_ctrl_c_while_it_still_imports_is_an_exit_code(tmp_path: Path) -> None:
    ended = started_with("raise KeyboardInterrupt", tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_missing_packages_print_what_to_install(tmp_path: Path) -> None:
    ended = started_with("raise ModuleNotFoundError('no typer', name='typer')", tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "sluice: This command needs the package typer: install sluice-llm[all].\n"
