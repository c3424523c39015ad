"""What the supervisor reads from its children."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.base import logs
from sluice.cli.up.plan import Process
from sluice.cli.up.process import Child, _interpreter, complaint, error_of, exit_words, is_log_line
from sluice.cli.up.ready import reachable
from tests.support.repository import ROOT


def record(level: int) -> logging.LogRecord:
    made = logging.LogRecord("services.router", level, __file__, 1, "Redis is away", None, None)
    made.attempt = 3
    return made


@pytest.mark.parametrize("formatter", [logs.TextFormatter(), logs.JsonFormatter("router")])
@pytest.mark.parametrize(("level", "found"), [(logging.WARNING, True), (logging.ERROR, True), (logging.INFO, False)])
def test_warnings_are_recognised_in_both_log_formats(formatter: logging.Formatter, level: int, found: bool) -> None:
    assert complaint(formatter.format(record(level))) == ("Redis is away" if found else "")


@pytest.mark.parametrize("line", ["", "{", '{"level": 3}', "Traceback (most recent call last):", "WARNING: beware"])
def test_other_lines_are_no_complaints(line: str) -> None:
    assert complaint(line) == ""


def test_exit_words() -> None:
    assert exit_words(3) == "exited with code 3"
    assert exit_words(-signal.SIGKILL) == "was killed by SIGKILL"
    assert exit_words(-250) == "was killed by signal 250"


def test_wildcard_hosts_are_reached_through_loopback() -> None:
    assert [reachable(host) for host in ("0.0.0.0", "::", "10.0.0.1")] == ["127.0.0.1", "::1", "10.0.0.1"]


@pytest.mark.parametrize("formatter", [logs.TextFormatter(), logs.JsonFormatter("router")])
def test_errors_are_recognised_in_both_log_formats(formatter: logging.Formatter) -> None:
    assert error_of(formatter.format(record(logging.ERROR))) == "Redis is away"
    assert error_of(formatter.format(record(logging.WARNING))) == ""
    assert all(is_log_line(formatter.format(record(level))) for level in (logging.INFO, logging.ERROR))
    assert not is_log_line("python -m services.worker: --speedup: Input should be a valid number")


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        ("12:00:00.000 ERROR   worker  cannot start\n12:00:00.001 INFO    worker  stopping", "cannot start"),
        ("12:00:00.000 INFO    worker  starting\nValueError: no such thing", "ValueError: no such thing"),
        ("starting\n12:00:00.000 INFO    worker  stopping", ""),
    ],
)
async def test_cause_of_an_end_is_the_last_error_or_text(printed: str, cause: str, tmp_path: Path) -> None:
    (tmp_path / "printing.py").write_text(f"print({printed!r})")
    process = Process("w", "printing", (), "127.0.0.1", 1, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    child = Child(process, lambda line: None)
    assert await (await child.start()) == 0
    assert child.cause == cause


def _run_in(python: Path, module: str) -> subprocess.CompletedProcess[str]:
    command = [*_interpreter(str(python)), str(os.getpid()), module, "--help"]
    return subprocess.run(
        command,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=python.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,
    )


def _program(file: Path, command: str) -> Path:
    file.write_text(f'#!/bin/sh\necho started >> {file.with_suffix(".log")}\nexec {sys.executable} {command} "$@"\n')
    file.chmod(0o755)
    return file


def test_worker_in_another_interpreter_runs_this_code_with_its_packages(tmp_path: Path) -> None:
    python = _program(tmp_path / "python", "")
    ended = _run_in(python, "services.worker")
    assert ended.returncode == 0, ended.stderr
    assert "--engine-args" in ended.stdout
    assert python.with_suffix(".log").read_text() == "started\n"


def test_worker_in_an_interpreter_without_packages_names_what_to_install(tmp_path: Path) -> None:
    ended = _run_in(_program(tmp_path / "python", "-S"), "services.worker")
    assert ended.returncode == 1
    assert re.search(r"lacks the package \w+; install sluice-llm\[worker\] for it", ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr
