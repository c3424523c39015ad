"""Measures which branches of services and sluice the unit tests take, and holds them to the floor in pyproject.toml."""

from __future__ import annotations

import io
import shutil
from collections.abc import Generator

import coverage
import pytest

from tests.support.repository import ROOT

UNIT = ROOT / "tests/unit"
CONFIG = str(ROOT / "pyproject.toml")
FOLDER = ROOT / "build/coverage"
"""Where pyproject.toml has the data."""


class BranchCoverage:
    """Measures in every process of a run; the one that controls the others adds up and compares.

    Only imports and unit tests are measured: tests with other processes would wait longer for this one.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._controls = not hasattr(config, "workerinput")
        self._said = ""
        if self._controls:
            shutil.rmtree(FOLDER, ignore_errors=True)
            FOLDER.mkdir(parents=True)
        self._coverage = coverage.Coverage(config_file=CONFIG, data_suffix=True)
        self._coverage.start()

    def pytest_collection_finish(self) -> None:
        """Ends the measurement of what modules do when they are imported."""
        self._coverage.stop()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
        """Measures a unit test with its fixtures."""
        if not item.path.is_relative_to(UNIT):
            return (yield)
        self._coverage.start()
        try:
            return (yield)
        finally:
            self._coverage.stop()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Stores what this process measured; fails a run whose sum is below the floor."""
        self._coverage.stop()
        self._coverage.save()
        if not self._controls:
            return
        summed = coverage.Coverage(config_file=CONFIG)
        summed.combine()
        summed.save()
        total, floor = summed.report(file=io.StringIO()), float(str(summed.get_option("report:fail_under")))
        self._said = f"branch coverage of the unit tests: {total:.2f} %, the floor is {floor:g} %"
        if total < floor and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Reports the sum."""
        if self._said:
            terminalreporter.write_line(self._said)
