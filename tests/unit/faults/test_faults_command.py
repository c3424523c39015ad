"""The command of the fault matrix: what it says of wrong options."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.faults.host import Host
from tests.support.faults.lanes import Share, run_shares, shares_of
from tests.support.faults.row import Row
from tests.support.faults.selection import planned
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


async def test_share_whose_process_dies_is_a_red_row_for_each_fault() -> None:
    rows: list[Row] = []
    share = Share("leases-off", "gateway", ("sigkill", "sigterm"))
    await run_shares([sys.executable, "-c", "raise SystemExit(9)"], [share], 2, rows.extend)
    assert [(row.part, row.fault, row.broken, row.red) for row in rows] == [
        ("gateway", "sigkill", "leases-off", True),
        ("gateway", "sigterm", "leases-off", True),
    ]


def test_rows_of_a_suite_are_a_share_of_each_part() -> None:
    rows = planned(["worker", "router"], ["sigkill", "sigterm", "clock-10min"], ["chat"], Host())
    assert {(share.part, share.faults) for share in shares_of("", rows)} >= {
        ("worker", ("sigkill", "sigterm")),
        ("router", ("sigkill", "sigterm")),
    }
