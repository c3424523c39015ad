"""The file of `sluice up --engines`: a list of running vLLM and SGLang servers.

- name: first                          # worker id, unique
  url: http://10.0.0.1:8000            # of the server
  kv_events: tcp://10.0.0.1:5557       # optional; by default as the server reports it; "off": none
  kv_replay: tcp://10.0.0.1:5558       # optional, with kv_events
  api_key_file: keys/first             # optional; relative to this file
  model: chat=/models/chat             # optional NAME=SOURCE; by default the server's own
  block_size: 32                       # optional; by default the server's own
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from services.common.errors import LONGEST_NAME, quoted
from services.common.models import ModelSpec
from services.worker.engines.http.options import NO_EVENTS, endpoint_problem, url_problem

Node: TypeAlias = Any
"""A node of PyYAML, whose types lack `id`."""

MAX_FILE_BYTES = 1 << 20
MAX_ENGINES = 990
MAX_BLOCK = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class BadRegistry(Exception):
    """Raised for an invalid file; the message is `FILE:LINE: FIELD …`."""


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One running server; empty and zero leave the choice to the server.

    Attributes:
        name: id of its worker.
        line: where it begins in its file; not part of its identity.
    """

    name: str
    url: str
    kv_events: str = ""
    kv_replay: str = ""
    api_key_file: str = ""
    model: str = ""
    block_size: int = 0
    line: int = field(default=0, compare=False)

    def worker_arguments(self) -> tuple[str, ...]:
        """Returns the flags of its worker."""
        options = {name: getattr(self, name) for name in ("url", "kv_events", "kv_replay", "api_key_file")}
        return (
            *("--worker-id", self.name, "--engine", "http"),
            *("--engine-args", json.dumps({name: value for name, value in options.items() if value})),
            *(("--model", self.model) if self.model else ()),
            *(("--block-size", str(self.block_size)) if self.block_size else ()),
        )


class EngineRegistry(Protocol):
    """Where the list of running servers comes from."""

    def entries(self) -> Sequence[EngineEntry]:
        """Returns the current servers; raises BadRegistry when the list is invalid or unavailable."""


class EngineFile:
    """Reads the servers from a file.

    Args:
        path: YAML, or JSON, which is a subset of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def entries(self) -> Sequence[EngineEntry]:
        """Returns the servers in the order of the file; raises BadRegistry at the first mistake."""
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise BadRegistry(f"{self._path}: the file cannot be read: {error.strerror}.") from error
        if len(content) > MAX_FILE_BYTES:
            raise BadRegistry(f"{self._path}: the file is larger than {MAX_FILE_BYTES >> 10} KiB.")
        return tuple(self._read(content))

    def _read(self, content: bytes) -> Iterator[EngineEntry]:
        root = self._parse(content)
        if root is None:
            return
        if root.id != "sequence":
            raise self._mistake(root, "the file", "must be a list of engines")
        if len(root.value) > MAX_ENGINES:
            raise self._mistake(root, "the file", f"lists more than {MAX_ENGINES} engines")
        names: dict[str, int] = {}
        urls: dict[str, int] = {}
        for node in root.value:
            entry = self._entry(node)
            for field_name, value, seen in (("name", entry.name, names), ("url", entry.url.rstrip("/"), urls)):
                if value in seen:
                    raise self._mistake(node, field_name, f"{quoted(value)} is already used in line {seen[value]}")
                seen[value] = entry.line
            yield entry

    def _parse(self, content: bytes) -> Node:
        import yaml

        try:
            return yaml.compose(content, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise BadRegistry(f"{self._path}:{line}: the file is not valid YAML: {error.problem}.") from error
        except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
            raise BadRegistry(f"{self._path}:1: the file is not valid YAML.") from error

    def _entry(self, node: Node) -> EngineEntry:
        if node.id != "mapping":
            raise self._mistake(node, "the entry", "must be a mapping with name and url")
        values: dict[str, Any] = {}
        for key, value in node.value:
            name = str(key.value)
            if name not in _FIELDS:
                raise self._mistake(key, name[:LONGEST_NAME], f"is unknown; use {', '.join(_FIELDS)}")
            if name in values:
                raise self._mistake(key, name, "is set twice")
            values[name] = self._value(name, value)
        for name in ("name", "url"):
            if name not in values:
                raise self._mistake(node, name, "is missing")
        if values.get("kv_replay") and values.get("kv_events", NO_EVENTS) == NO_EVENTS:
            raise self._mistake(node, "kv_replay", "needs kv_events")
        return EngineEntry(**values, line=node.start_mark.line + 1)

    def _value(self, name: str, node: Node) -> str | int:
        kind = "int" if name == "block_size" else "str"
        if node.id != "scalar" or node.tag != f"tag:yaml.org,2002:{kind}":
            raise self._mistake(node, name, "must be a number" if kind == "int" else "must be a text; quote it")
        text = str(node.value)
        if problem := _PROBLEMS[name](text):
            raise self._mistake(node, name, problem)
        if name == "api_key_file":
            path = self._path.parent / Path(text).expanduser()
            if not path.is_file():
                raise self._mistake(node, name, f"{quoted(text)} is not a file")
            return str(path.resolve())
        return int(text) if kind == "int" else text

    def _mistake(self, node: Node, name: str, problem: str) -> BadRegistry:
        return BadRegistry(f"{self._path}:{node.start_mark.line + 1}: {name} {problem}.")


def _name_problem(name: str) -> str:
    if _NAME.fullmatch(name) and len(name) <= LONGEST_NAME:
        return ""
    return f"is {quoted(name)}; use letters, digits, dots, dashes and underscores"


def _events_problem(endpoint: str) -> str:
    return "" if endpoint == NO_EVENTS else _endpoint_problem(endpoint)


def _endpoint_problem(endpoint: str) -> str:
    return endpoint_problem(endpoint) if endpoint else "must not be empty"


def _model_problem(model: str) -> str:
    try:
        ModelSpec.parse(model)
    except ValueError as error:
        return f"is {quoted(model)}: {error}"
    return ""


def _block_problem(size: str) -> str:
    if size.isascii() and size.isdecimal() and len(size) < 5 and 1 <= int(size) <= MAX_BLOCK:
        return ""
    return f"is {quoted(size)}; it must be between 1 and {MAX_BLOCK}"


_PROBLEMS: Mapping[str, Callable[[str], str]] = {
    "name": _name_problem,
    "url": url_problem,
    "kv_events": _events_problem,
    "kv_replay": _endpoint_problem,
    "api_key_file": lambda path: "" if path else "must not be empty",
    "model": _model_problem,
    "block_size": _block_problem,
}
_FIELDS = tuple(one.name for one in fields(EngineEntry) if one.name != "line")
