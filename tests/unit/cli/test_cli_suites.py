"""The files by which commands find the suites that run, and `sluice ps`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.cli.errors import BadFlag
from sluice.cli.live.endpoint import DEFAULT_GATEWAY, Endpoint
from sluice.cli.suites import RunningSuite, SuiteFile, folder, running_suites
from tests.unit.cli.conftest import Sluice

URL = "http://127.0.0.1:8123"


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def file() -> Iterator[SuiteFile]:
    """Of one running suite."""
    file = SuiteFile()
    file.write(RunningSuite(os.getpid(), URL, "tekken", processes=[{"name": "gateway", "address": "a:1", "pid": 1}]))
    yield file
    file.remove()


def second_suite(url: str) -> subprocess.Popen[str]:
    """A suite of another process, which ends with its standard input."""
    script = (
        "import sys, os; from sluice.cli.suites import *\n"
        f"SuiteFile().write(RunningSuite(os.getpid(), {url!r})); print('written', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    return process


def test_command_without_a_gateway_reaches_the_only_suite(file: SuiteFile) -> None:
    assert Endpoint().located().gateway == URL
    assert Endpoint(gateway="http://elsewhere:1").located().gateway == "http://elsewhere:1"
    file.remove()
    assert Endpoint().located().gateway == DEFAULT_GATEWAY


def test_command_without_a_gateway_trusts_the_certificates_of_the_suite(file: SuiteFile, tmp_path: Path) -> None:
    file.write(RunningSuite(os.getpid(), "https://127.0.0.1:1", tls=str(tmp_path)))
    assert Endpoint().located().trust.folder == tmp_path


def test_several_suites_are_named_in_the_refusal(file: SuiteFile) -> None:
    other = second_suite("http://127.0.0.1:9")
    try:
        assert [suite.url for suite in running_suites()] == [URL, "http://127.0.0.1:9"]
        with pytest.raises(BadFlag, match=f"2 suites run on this machine: {URL}, http://127.0.0.1:9; choose one"):
            Endpoint().located()
    finally:
        other.kill()
        other.communicate()


def test_file_of_a_killed_suite_is_removed_and_not_used() -> None:
    other = second_suite(URL)
    assert [suite.url for suite in running_suites()] == [URL]
    other.kill()
    other.communicate()
    assert len(list(folder().iterdir())) == 1
    assert running_suites() == []
    assert list(folder().iterdir()) == []


def test_damaged_file_is_ignored(file: SuiteFile) -> None:
    path = next(folder().iterdir())
    path.write_text('{"pid": 1, "surprise": 2}')
    assert running_suites() == []
    path.write_text("{")
    assert running_suites() == []


def test_ps_lists_the_processes_of_the_suites(
    file: SuiteFile, sluice: Sluice, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sluice("ps") == 0
    printed = capsys.readouterr().out
    assert URL in printed
    assert "gateway" in printed
    assert sluice("ps", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["url"] == URL


def test_ps_prints_the_id_of_one_process(file: SuiteFile, sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    assert sluice("ps", "--pid", "gateway") == 0
    assert capsys.readouterr().out == "1\n"
    assert sluice("ps", "--pid", "worker-7") == 2
    assert "--pid worker-7 is no process of the suite; it has gateway." in capsys.readouterr().err
    file.remove()
    assert sluice("ps", "--pid", "gateway") == 2
    assert "no suite runs on this machine" in capsys.readouterr().err


def test_ps_without_a_suite_says_how_to_start_one(sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    assert sluice("ps") == 1
    assert "start one with `sluice up`" in capsys.readouterr().out
