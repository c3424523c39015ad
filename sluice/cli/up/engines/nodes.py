"""Reading of a YAML file whose mistakes are reported with line and field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from services.common.base.errors import MAX_NAME_LENGTH, quoted
from sluice.cli.up.engines.entries import BadRegistry

Node: TypeAlias = Any
"""A node of PyYAML, whose types lack `id`."""

MAX_FILE_BYTES = 1 << 20
"""Bytes of the file of `sluice follow`; a larger one is refused."""


class YamlFile:
    """A file of limited size, read at each call of `root`.

    Args:
        path: YAML, or JSON, which is a subset of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def root(self) -> Node:
        """Returns the root node; None for an empty file; raises BadRegistry for an unreadable or malformed one."""
        import yaml

        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise BadRegistry(f"{self._path}: the file cannot be read: {error.strerror}.") from error
        if len(content) > MAX_FILE_BYTES:
            raise BadRegistry(f"{self._path}: the file is larger than {MAX_FILE_BYTES >> 10} KiB.")
        try:
            return yaml.compose(content, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise BadRegistry(f"{self._path}:{line}: the file is not valid YAML: {error.problem}.") from error
        except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
            raise BadRegistry(f"{self._path}:1: the file is not valid YAML.") from error

    def fields(
        self, node: Node, rules: Mapping[str, Callable[[str], str]], numbers: Iterable[str], required: Iterable[str]
    ) -> dict[str, Any]:
        """Returns the fields of a mapping; raises BadRegistry at the first mistake.

        Args:
            rules: for each field, a function that returns why a value is invalid; empty if it is valid.
            numbers: the fields that are numbers; all others are text.
            required: the fields that must be set.
        """
        values: dict[str, Any] = {}
        for key, value in node.value:
            name = str(key.value)
            if name not in rules:
                raise self.mistake(key, name[:MAX_NAME_LENGTH], f"is unknown; use {', '.join(rules)}")
            if name in values:
                raise self.mistake(key, name, "is set twice")
            values[name] = self._value(name, value, rules[name], name in numbers)
        for name in required:
            if name not in values:
                raise self.mistake(node, name, "is missing")
        return values

    def mistake(self, node: Node, name: str, problem: str) -> BadRegistry:
        """Returns the error for a mistake in a field, or in what else `name` says."""
        return BadRegistry(f"{self._path}:{node.start_mark.line + 1}: {name} {problem}.")

    def _value(self, name: str, node: Node, rule: Callable[[str], str], number: bool) -> str | int:
        if node.id != "scalar" or node.tag != f"tag:yaml.org,2002:{'int' if number else 'str'}":
            raise self.mistake(node, name, "must be a number" if number else "must be a text; quote it")
        text = str(node.value)
        if problem := rule(text):
            raise self.mistake(node, name, problem)
        if name.endswith("_file"):
            path = self._path.parent / Path(text).expanduser()
            if not path.is_file():
                raise self.mistake(node, name, f"{quoted(text)} is not a file")
            return str(path.resolve())
        return int(text) if number else text
