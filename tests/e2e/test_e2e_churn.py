"""A minute of churn: processes and a model end and start at random under load; every answer is the one before it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.repository import ROOT

pytestmark = pytest.mark.slow
MINUTES = 1.0
LIMIT_S = 600


@pytest.mark.parametrize("seed", [11, 12])
def test_churn_of_all_tiers_under_load_changes_no_answer_and_leaves_nothing(seed: int) -> None:
    command = [sys.executable, "benchmarks/churn.py", "--minutes", str(MINUTES), "--seed", str(seed)]
    done = subprocess.run(
        [*command, "--streams", "32", "--rate", "10"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    counted = dict(line.split(": ") for line in done.stdout.splitlines() if line.startswith(("stream:", "short:")))
    assert all(int(count.replace(",", "")) > 100 for count in counted.values())
    assert counted.keys() == {"stream", "short"}
