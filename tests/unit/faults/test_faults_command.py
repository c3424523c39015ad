"""The command of the fault matrix: what it says of wrong options."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.repository import ROOT


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--part", "engine"], "Unknown part 'engine'; choose from worker, "),
        (["--fault", "sigfoo"], "Unknown fault 'sigfoo'; choose from sigkill, "),
        (["--load", "chats"], "Unknown load 'chats'; choose from chat, "),
        (["--break", "everything"], "Unknown break 'everything'; choose from migration-off, "),
        (["--part", "router", "--fault", "flushall"], "None of these faults happens to these parts"),
        (["--part", "router", "--fault", "sigkill", "--other", "nowhere"], "--other: nowhere is not a folder."),
    ],
)
def test_fault_matrix_with_a_wrong_option_names_the_known_ones_and_ends_with_2(options: list[str], said: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "fault_matrix.py"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stdout == ""


def test_fault_matrix_of_a_cell_that_cannot_run_is_not_run_and_not_green() -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "fault_matrix.py"),
        "--part",
        "router",
        "--fault",
        "rolling-upgrade",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0
    assert "Not run, " in ended.stderr
    assert "0 cells run." in ended.stderr
    assert ended.stdout == ""
