"""What others extend is importable from `sluice`, and does not change unnoticed.

After an intended change: `python tests/unit/repository/test_repository_public_surface.py`, and say so in the commit.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT

MODULES = (
    "sluice.apis",
    "sluice.engine",
    "sluice.parsers",
    "sluice.policies",
    "sluice.stages",
    "sluice.testing",
    "sluice.tokenizers",
)
RECORD = Path(__file__).with_name("public_surface.txt")


def listing() -> Iterator[str]:
    """Yields a line for each public name, method and field."""
    for module in MODULES:
        names = import_module(module)
        for name in sorted(names.__all__):
            for line in described(f"{module}.{name}", getattr(names, name)):
                yield re.sub(r" at 0x[0-9a-f]+", "", line)  # the address of a default


def described(path: str, thing: Any) -> Iterator[str]:
    if not inspect.isclass(thing):
        yield f"{path}{inspect.signature(thing) if inspect.isfunction(thing) else ''}"
        return
    yield f"class {path}"
    if issubclass(thing, enum.Enum):
        yield from (f"  {member.name} = {member.value!r}" for member in thing)
        return
    if dataclasses.is_dataclass(thing):
        yield from (f"  {field.name}: {field.type}" for field in dataclasses.fields(thing))
    for name, member in sorted(vars(thing).items()):
        if inspect.isfunction(member) and (not name.startswith("_") or name == "__init__"):
            if name != "__init__" or not dataclasses.is_dataclass(thing):
                yield f"  {name}{inspect.signature(member)}"
        elif isinstance(member, property) and not name.startswith("_"):
            yield f"  {name} (property)"


def test_public_surface_is_as_recorded() -> None:
    assert list(listing()) == RECORD.read_text("utf-8").splitlines()


def test_examples_import_only_the_public_surface() -> None:
    imported = {
        f"{path.relative_to(ROOT)}: {node.module}"
        for path in (ROOT / "examples").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("services", "sluice."))
    }
    assert imported
    assert {each for each in imported if each.split(": ")[1] not in {*MODULES, "sluice.v1"}} == set()


if __name__ == "__main__":
    RECORD.write_text("\n".join(listing()) + "\n", "utf-8")
