"""Cells of the fault matrix, run by its own command: no client notices more than a pause."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT

RUN_S = 900
TOOL = ROOT / "benchmarks" / "fault_matrix.py"
ROWS = (
    ("worker", "sigkill", ("chat", "whole", "tools", "images", "responses", "websocket", "messages", "batch", "route")),
    ("postprocess", "sigkill", ("chat", "tools", "messages", "background")),
    ("router", "sigkill", ("chat", "whole", "route", "picker")),
    ("preprocess", "sigterm", ("chat", "whole")),
    ("gateway", "sigkill", ("chat", "responses")),
    ("gateway", "clock-10min", ("chat", "background")),
    ("preprocess", "token-rotated", ("chat", "whole")),
)
CELLS = [(part, fault, load) for part, fault, loads in ROWS for load in loads]

pytestmark = pytest.mark.slow


def tool(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *options], capture_output=True, text=True, timeout=RUN_S, check=False, cwd=ROOT
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[tuple[str, str], Any]:
    """The rows of the cells that are tested, each run once with all of its loads."""
    folder = tmp_path_factory.mktemp("matrix")
    wanted = {item.callspec.params["cell"][:2] for item in request.session.items if _is_cell(item)}  # type: ignore[attr-defined]
    found = {}
    for part, fault, loads in ROWS:
        if (part, fault) in wanted:
            found[part, fault] = _row(folder / f"{part}-{fault}.json", part, fault, loads)
    return found


def _is_cell(item: pytest.Item) -> bool:
    return item.path == Path(__file__) and "cell" in getattr(getattr(item, "callspec", None), "params", {})


def _row(file: Path, part: str, fault: str, loads: tuple[str, ...]) -> Any:
    chosen = [word for load in loads for word in ("--load", load)]
    ended = tool("--part", part, "--fault", fault, *chosen, "--seconds", "4", "--json", str(file))
    assert file.exists(), ended.stderr
    [row] = json.loads(file.read_text())["rows"]
    assert ended.returncode == int(row["red"]), ended.stderr
    return row


@pytest.mark.parametrize("cell", CELLS, ids=["-".join(cell) for cell in CELLS])
def test_fault_in_a_cell_is_no_more_than_a_pause_to_clients(
    rows: dict[tuple[str, str], Any], cell: tuple[str, str, str]
) -> None:
    part, fault, load = cell
    row = rows[part, fault]
    if row["not_run"]:
        pytest.skip(row["not_run"])
    [found] = [one for one in row["cells"] if one["load"] == load]
    assert found["requests"] > 0
    assert found["perfect"] or found["sentence"], found
    assert not row["problem"]
    held = {name: row["left"][name] for name in ("reservations", "streams", "running", "keys", "errors")}
    assert not any(held.values()), held


def test_matrix_without_migration_is_red() -> None:
    ended = tool("--part", "worker", "--fault", "sigkill", "--load", "chat", "--break", "migration-off")
    assert ended.returncode == 1, ended.stderr
    assert "red: migration-off, worker, sigkill, chat: " in ended.stderr
