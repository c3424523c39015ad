"""Measures which branches of the product the unit tests take, and holds them to a floor."""

from __future__ import annotations

import io
import shutil
from collections.abc import Generator
from dataclasses import dataclass

import coverage
import pytest

from tests.support.repository import ROOT

CONFIG = str(ROOT / "pyproject.toml")
FOLDER = ROOT / "build/coverage"
"""Where pyproject.toml has the data."""


@dataclass(frozen=True)
class Part:
    """Packages of the product, the folders of unit tests that are measured for them, and the percentage to reach.

    Attributes:
        floor: None: that of pyproject.toml.
    """

    source: tuple[str, ...] | None
    tests: tuple[str, ...]
    floor: float | None


CORE = ("router", "gateway/admission", "gateway/streams")
PARTS = {
    "all": Part(None, ("",), None),
    # Where a missed branch costs most. Measuring everything would make a run of all tests minutes longer.
    "core": Part(tuple(f"services/{name}" for name in CORE), CORE, 78),
}


class BranchCoverage:
    """Measures imports and unit tests in every process of a run; the one that controls the others adds up."""

    def __init__(self, config: pytest.Config, part: Part) -> None:
        self._controls = not hasattr(config, "workerinput")
        self._part = part
        self._folders = [ROOT / "tests/unit" / name for name in part.tests]
        self._said = ""
        if self._controls:
            shutil.rmtree(FOLDER, ignore_errors=True)
            FOLDER.mkdir(parents=True)
        self._coverage = self._reader(suffix=True)
        self._coverage.start()

    def _reader(self, suffix: bool) -> coverage.Coverage:
        source = [str(ROOT / name) for name in self._part.source] if self._part.source else None
        return coverage.Coverage(config_file=CONFIG, data_suffix=suffix or None, source=source)

    def pytest_collection_finish(self) -> None:
        """Ends the measurement of what modules do when they are imported."""
        self._coverage.stop()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
        """Measures a unit test with its fixtures."""
        if not any(item.path.is_relative_to(folder) for folder in self._folders):
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
        summed = self._reader(suffix=False)
        summed.combine()
        summed.save()
        total = summed.report(file=io.StringIO())
        floor = float(str(summed.get_option("report:fail_under"))) if self._part.floor is None else self._part.floor
        self._said = f"branch coverage of unit tests: {total:.2f} %, the floor is {floor:g} %"
        if total < floor and session.exitstatus == pytest.ExitCode.OK and not self._is_partial(session.config):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _is_partial(self, config: pytest.Config) -> bool:
        """Whether some of the measured tests were left out by a flag or by paths, so that the floor does not apply."""
        has_paths = self._part.floor is not None and config.args_source is pytest.Config.ArgsSource.ARGS
        return bool(config.option.keyword) or has_paths

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Reports the sum."""
        if self._said:
            terminalreporter.write_line(self._said)
