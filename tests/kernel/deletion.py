"""Deletes an extension in a copy of the tree, and installs the copy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kernel.extensions import Extension
from tests.support.repository import ROOT

DISTRIBUTION = ("services", "sluice", "pyproject.toml", "README.md", "LICENSE")
"""What the distribution is built from."""
SUITE = ("tests", "examples", "protos", "clients", "benchmarks", "docs", "scripts", "pyproject.toml")
"""What tests are run with, beside the installed distribution."""
SITE = "SLUICE_TEST_SITE"
"""Variable with the folder of the installed distribution."""


@dataclass(frozen=True)
class Kernel:
    """The suite without an extension.

    Attributes:
        site: the folder with the installed distribution.
        tests: the folder with the tests that remain.
    """

    site: Path
    tests: Path

    def run(self, *command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Runs a command of this interpreter with the installed distribution."""
        path = os.pathsep.join([str(self.site), str(self.tests)])
        inherited = {name: value for name, value in os.environ.items() if name != "SLUICE_TEST_COVERAGE"}
        environment = {**inherited, "PYTHONPATH": path, SITE: str(self.site)}
        return subprocess.run(
            [sys.executable, *command],
            cwd=self.tests,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def without(extension: Extension, folder: Path) -> Kernel:
    """Returns the suite without an extension, made in an empty folder."""
    source, tests, site = folder / "source", folder / "suite", folder / "site"
    copy(DISTRIBUTION, source)
    copy(SUITE, tests)
    for name in extension.folders:
        remove(source / name)
    for name in extension.tests:
        remove(tests / name)
    for tree in (source, tests):
        project = tree / "pyproject.toml"
        project.write_text(without_entry_points(project.read_text("utf-8"), extension.entry_points), "utf-8")
    flags = ("--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", "--quiet", *flags, "--target", str(site), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(source)  # nothing of it may be imported
    return Kernel(site, tests)


def copy(names: Sequence[str], folder: Path) -> None:
    """Copies files and folders of the tree."""
    folder.mkdir()
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy2(ROOT / name, folder / name)


def remove(path: Path) -> None:
    """Deletes a file or folder, which must exist."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def without_entry_points(project: str, entry_points: Sequence[str]) -> str:
    """Returns the text of a pyproject.toml without lines of entry points, each of which must be there once.

    Args:
        entry_points: `group name` of each.
    """
    for entry_point in entry_points:
        group, _, name = entry_point.partition(" ")
        section = re.compile(rf'(?ms)^\[project\.entry-points\."{re.escape(group)}"\]\n.*?(?=^\[|\Z)')
        found = section.search(project)
        assert found is not None, f"{group} is not in pyproject.toml"
        rest, count = re.subn(rf"(?m)^{re.escape(name)} = .*\n", "", found[0])
        assert count == 1, f"{entry_point} is not in pyproject.toml"
        project = project[: found.start()] + rest + project[found.end() :]
    return project
