"""The distribution is `sluice-llm`: `sluice` on the package index belongs to another project."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sluice import __version__
from tests.support.repository import ROOT

NAME, FOREIGN = "sluice-llm", "sluice"
SUFFIXES = {".cfg", ".ini", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", ""}
NOT_OURS = {"__pycache__", "_wire", "build", "dist"}

_EXTRA = re.compile(r"(?<![\w-])sluice\\?\[[a-z]")
_PINNED = re.compile(r"(?<![\w.-])sluice\s*(?:==|>=|~=|<=|!=)\s*\d")
_INSTALLED = re.compile(r"pip3? (?:install|download|wheel)\b[^\n`#]*?\s['\"]?sluice['\"]?(?=[\s`.,;)]|$)")


def is_ours(path: Path) -> bool:
    """Whether a path of the checkout is neither generated nor a tool's own, such as .venv or *.egg-info."""
    parts = path.relative_to(ROOT).parts
    made = any(part.startswith(".") or part.endswith(".egg-info") for part in parts)
    return parts[0] == ".ci" or not (made or NOT_OURS & set(parts))


def project_files() -> list[Path]:
    """Every pyproject.toml of the repository."""
    return [path for path in ROOT.rglob("pyproject.toml") if is_ours(path)]


def requirements_of(project: dict[str, Any]) -> Iterator[Requirement]:
    """Every requirement that a pyproject.toml names, extras and groups included."""
    table = project.get("project", {})
    groups = [
        project.get("build-system", {}).get("requires", []),
        table.get("dependencies", []),
        *table.get("optional-dependencies", {}).values(),
        *project.get("dependency-groups", {}).values(),
    ]
    yield from (Requirement(text) for group in groups for text in group if isinstance(text, str))


def foreign_names(text: str) -> list[str]:
    """The pieces of a text that would make pip install the other project's package."""
    return [found.group() for pattern in (_EXTRA, _PINNED, _INSTALLED) for found in pattern.finditer(text)]


def texts() -> Iterator[tuple[str, str]]:
    for path in sorted(ROOT.rglob("*")):
        if path == Path(__file__) or path.suffix not in SUFFIXES or not is_ours(path) or not path.is_file():
            continue
        yield str(path.relative_to(ROOT)), path.read_text("utf-8", errors="replace")


def test_the_project_is_installed_under_its_name() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == NAME
    assert metadata.version(NAME) == __version__
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version(FOREIGN)


def test_no_project_file_requires_the_foreign_distribution() -> None:
    paths = project_files()
    assert len(paths) >= 3, "the project's, the client's and the example engine's"
    found = {
        str(path.relative_to(ROOT)): [
            str(one)
            for one in requirements_of(tomllib.loads(path.read_text()))
            if canonicalize_name(one.name) == FOREIGN
        ]
        for path in paths
    }
    assert not any(found.values()), found


def test_extras_of_the_project_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    named = {
        extra
        for _, text in texts()
        for group in re.findall(r"sluice-llm\\?\[([a-z,-]+)", text)
        for extra in group.split(",")
    }
    assert named
    assert named <= extras


def test_pinned_requirements_leave_the_foreign_distribution_out() -> None:
    for path in ROOT.glob("requirements/**/*.txt"):
        for line in path.read_text().splitlines():
            try:
                name = Requirement(line.partition(" ;")[0].rstrip(" \\")).name
            except InvalidRequirement:
                continue  # a hash
            assert canonicalize_name(name) != FOREIGN, path.name


def test_no_file_tells_anyone_to_install_the_foreign_distribution() -> None:
    found = {place: names for place, text in texts() if (names := foreign_names(text))}
    assert found == {}


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ('dependencies = ["sluice[worker]"]', False),
        ("pip install 'sluice[gateway]'", False),
        ("pip install --upgrade sluice", False),
        ("`pip install sluice`", False),
        ("sluice==0.1.0 \\", False),
        ("pip install 'sluice-llm[gateway]'", True),
        ("pip install ./examples/engine  # needs sluice", True),
        ("pip install --target /opt/sluice /dist/x.whl", True),
        ("pip install sluice-llm", True),
    ],
)
def test_a_foreign_name_is_found(text: str, harmless: bool) -> None:
    assert (foreign_names(text) == []) is harmless
