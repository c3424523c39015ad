"""Clocks of single processes, which are moved while these run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.faults.clocks import Clocks
from tests.support.faults.host import Host

TELLS = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
OFF_S = 600


@pytest.fixture
def clocks(tmp_path: Path) -> Clocks:
    if problem := Host().lacks("clock"):
        pytest.skip(problem)
    return Clocks(tmp_path / "clocks")


@contextmanager
def teller(prefix: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    """A process that tells its time for each line that it is sent."""
    command = [*prefix, sys.executable, "-c", TELLS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def told(process: subprocess.Popen[str]) -> tuple[float, float]:
    """By how much the process' time of day and its monotonic clock differ from those of this process."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    day, monotonic = map(float, process.stdout.readline().split())
    return day - time.time(), monotonic - time.monotonic()


@pytest.mark.parametrize("seconds", [OFF_S, -OFF_S])
def test_clock_that_is_moved_while_its_process_runs_moves_the_time_of_day_alone(clocks: Clocks, seconds: int) -> None:
    with teller(clocks.prefix("moved")) as moved, teller(clocks.prefix("other")) as other:
        assert told(moved) == pytest.approx((0, 0), abs=5)
        clocks.move("moved", seconds)
        assert told(moved) == pytest.approx((seconds, 0), abs=5)
        assert told(other) == pytest.approx((0, 0), abs=5)
        clocks.move("moved", 0)
        assert told(moved) == pytest.approx((0, 0), abs=5)


def test_process_without_a_clock_of_its_own_is_told_apart(clocks: Clocks) -> None:
    with teller(clocks.prefix("own")) as own, teller(()) as other:
        told(own), told(other)
        assert clocks.has_own(own.pid)
        assert not clocks.has_own(other.pid)
