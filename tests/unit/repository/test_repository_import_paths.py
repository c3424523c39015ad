"""The packages are found wherever a command is started, also in the folder above a clone that is called `sluice`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CLI = Path(sys.executable).with_name("sluice")


@pytest.mark.parametrize(
    "command",
    [
        (sys.executable, "-m", "services.router", "--help"),
        (sys.executable, "-m", "sluice.cli.main", "version"),
        (str(CLI), "version"),
    ],
)
def test_command_above_a_clone_called_sluice_runs(command: tuple[str, ...], tmp_path: Path) -> None:
    clone = tmp_path / "sluice"  # as of `git clone …/sluice`: without an __init__.py of its own
    (clone / "sluice").mkdir(parents=True)
    (clone / "README.md").write_text("a clone")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
