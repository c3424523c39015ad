"""No circle of files: what each module imports, also for types only and within functions."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.repository import ROOT

PACKAGES = ("services", "sluice")


def modules() -> dict[str, str]:
    """The text of each module by its dotted name, without generated code."""
    texts = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not name.startswith("sluice.v1"):
                texts[name] = path.read_text()
    return texts


def imports(text: str, names: frozenset[str]) -> set[str]:
    """The modules among `names` that a module imports."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names} & names
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                imported |= {inner if inner in names else node.module} & names
    return imported


def sort(texts: dict[str, str]) -> list[str]:
    """The modules in an order in which each follows what it imports; raises CycleError for a circle."""
    names = frozenset(texts)
    return list(TopologicalSorter({name: imports(text, names) - {name} for name, text in texts.items()}).static_order())


def test_modules_form_no_circle() -> None:
    assert len(sort(modules())) > 800


@pytest.mark.parametrize(
    "text", ["import b", "from b import x", "if TYPE_CHECKING:\n    from b import x", "def f():\n    import b"]
)
def test_circle_of_two_modules_is_found(text: str) -> None:
    with pytest.raises(CycleError):
        sort({"a": text, "b": "from a import y"})
