"""Upgrades: a process that is started from another source tree runs that tree's code, and none of this one's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.servers.loose_suite import LooseSuite

OTHER = "the other tree's router"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A tree whose router says that it ran."""
    package = tmp_path / "tree" / "services"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "router.py").write_text(f"print({OTHER!r})\n")
    return package.parent


def said(folder: Path, tree: Path | None) -> str:
    """What a router says that is started with flags that only another tree's accepts."""
    logs = folder / "logs"
    logs.mkdir()
    flags = {"router": ("--flag-of-the-other-tree",)}
    suite = LooseSuite(folder / "model", workers=0, postprocess=0, flags_of=flags, logs=logs)
    suite.start("router", tree)
    suite.ended("router")
    return (logs / "router.log").read_text()


def test_process_of_another_tree_runs_its_code(tmp_path: Path, other: Path) -> None:
    assert said(tmp_path, other).strip() == OTHER


def test_process_of_no_other_tree_runs_this_one(tmp_path: Path) -> None:
    assert "--flag-of-the-other-tree" in said(tmp_path, None)
