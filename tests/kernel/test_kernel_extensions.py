"""Each extension can be deleted: the kernel installs, starts, answers, and its tests pass."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.kernel.deletion import without, without_entry_points
from tests.kernel.extensions import EXTENSIONS, Extension
from tests.support.repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
CONTRACT = "The kernel imports no extension"
QUICK = ("engine-openai", "live-view")
"""Deleted by `make test`, without the tests of the kernel, which it runs anyway; `make test-kernel` deletes each."""
TIMEOUT_S = 1800


def check(extension: Extension, folder: Path, *tests: str) -> None:
    kernel = without(extension, folder)
    done = kernel.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernel/serving.py", *tests, timeout_s=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.mark.parametrize("extension", [one for one in EXTENSIONS if one.name in QUICK], ids=lambda one: one.name)
def test_kernel_without_extension_serves(extension: Extension, tmp_path: Path) -> None:
    check(extension, tmp_path)


@pytest.mark.kernel
@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda one: one.name)
def test_kernel_without_extension_serves_and_passes_its_tests(extension: Extension, tmp_path: Path) -> None:
    check(extension, tmp_path, *extension.kernel)


def test_list_of_extensions_has_every_entry_point_of_the_suite_once() -> None:
    listed = [line for extension in EXTENSIONS for line in extension.entry_points]
    registered = [f"{group} {name}" for group, points in PROJECT["project"]["entry-points"].items() for name in points]
    assert sorted(listed) == sorted(registered)


@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda extension: extension.name)
def test_paths_and_extra_of_extension_exist(extension: Extension) -> None:
    missing = [name for name in (*extension.folders, *extension.tests, *extension.kernel) if not (ROOT / name).exists()]
    assert missing == []
    points = [PROJECT["project"]["entry-points"][group][name] for group, name in map(str.split, extension.entry_points)]
    extras = {point.partition("[")[2].rstrip("]") for point in points}
    assert extras <= {"", extension.extra}
    assert extension.extra in ("", *PROJECT["project"]["optional-dependencies"])


def test_contract_of_imports_has_the_folders_of_every_extension() -> None:
    (contract,) = (one for one in PROJECT["tool"]["importlinter"]["contracts"] if one["name"] == CONTRACT)
    folders = {folder.removesuffix(".py").replace("/", ".") for extension in EXTENSIONS for folder in extension.folders}
    assert set(contract["protected_modules"]) == folders
    assert set(contract["allowed_importers"]) <= folders, "an extension of several folders may import its own"


def test_entry_point_that_is_not_registered_cannot_be_deleted() -> None:
    project = '[project.entry-points."sluice.engines"]\na = "b:C"\n[tool.x]\nz = 1\n'
    assert without_entry_points(project, ["sluice.engines a"]) == project.replace('a = "b:C"\n', "")
    with pytest.raises(AssertionError):
        without_entry_points(project, ["sluice.engines z"])
