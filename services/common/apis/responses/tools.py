"""Translates the tools and tool_choice of the Responses API to those of a chat."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.common.apis.field_reader import FieldReader
from services.common.apis.responses.custom_tools import read_custom
from services.common.apis.tool_definitions import TOOL_NAME_PATTERN, TOOL_NAME_RULE, read_definition
from services.common.base.budgets import Budget

HOSTED_TOOL = (
    "^(code_interpreter|computer|computer_use_preview|file_search|image_generation|mcp|programmatic_tool_calling"
    "|tool_search|web_search|web_search_preview)(_[0-9]{4}_[0-9]{2}_[0-9]{2})?$"
)
"""Types of the tools that OpenAI runs itself."""
_SEPARATOR = "__"
_TOOL_NAME = re.compile(TOOL_NAME_PATTERN)
_HOSTED_TOOL = re.compile(HOSTED_TOOL)


class ClientTool(NamedTuple):
    """A tool as the client names it."""

    name: str
    namespace: str = ""
    custom: bool = False

    @property
    def function(self) -> str:
        """The name of the function that the model calls."""
        return function_name(self.namespace, self.name)


def function_name(namespace: str, name: str) -> str:
    """Returns the name of the function for a tool of a namespace (empty: of none)."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools that the model may call.

    Attributes:
        chat: the tools of the chat request.
        paths: the path of each in the client's request.
        choice: the tool_choice of the chat request.
        client: the tools by the name of their function.
        left_out: types of the hosted tools, which are left out because they cannot run here.
    """

    chat: Sequence[dict[str, Any]]
    paths: Sequence[str]
    choice: Any
    client: Mapping[str, ClientTool]
    left_out: Sequence[str] = ()


NO_TOOLS = ChatTools([], [], None, {})


@dataclass(slots=True)
class _Tools:
    """Tools read so far."""

    chat: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    client: dict[str, ClientTool] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, reader: FieldReader, namespace: str = "") -> None:
        """Adds a tool, with its namespace if it is in one."""
        kind = reader.value.get("type") if isinstance(reader.value, dict) else None
        if _hosted(reader.value) and not namespace:
            self.left_out.append(str(kind))
        elif kind == "namespace" and not namespace:
            self._add_namespace(reader)
        else:
            self._add_function(reader, namespace)

    def _add_namespace(self, reader: FieldReader) -> None:
        name = reader.fields("type", "name", "description", "tools").under("name")
        if not _TOOL_NAME.fullmatch(name.text()):
            raise name.invalid(TOOL_NAME_RULE)
        reader.under("description").optional(str)
        for tool in reader.under("tools").items():
            self.add(tool, name.value)

    def _add_function(self, reader: FieldReader, namespace: str) -> None:
        kind = reader.kind("function", "custom") if namespace else reader.kind("function", "custom", "namespace")
        function = read_custom(reader) if kind == "custom" else _parameters(reader)
        name = reader.under("name")
        tool = ClientTool(name.text(), namespace, kind == "custom")
        if not _TOOL_NAME.fullmatch(tool.function):
            raise name.invalid(f"{TOOL_NAME_RULE}, its namespace included")
        if tool.function in self.client:
            raise name.invalid(f"{tool.function!r} is the name of another tool too")
        self.chat.append({"type": "function", "function": {"name": tool.function, **function}})
        self.paths.append(reader.path)
        self.client[tool.function] = tool


def read_tools(tools: list[Any] | None, tool_choice: Any, list_items: Budget) -> ChatTools:
    """Returns the validated tools; raises SluiceError(INVALID_ARGUMENT) for invalid ones."""
    found = _Tools()
    for reader in FieldReader(tools or [], "tools", "[]", list_items).items():
        found.add(reader)
    indexes: Sequence[int] = range(len(found.chat))
    mode = tool_choice
    choice = FieldReader(tool_choice, "tool_choice", "[]", list_items)
    if isinstance(tool_choice, dict) and tool_choice.get("type") == "allowed_tools":
        allowed = _allowed(choice, found.client)
        indexes = [index for index, name in enumerate(found.client) if name in allowed]
        mode = tool_choice["mode"]
    elif isinstance(tool_choice, dict):
        mode = {"type": "function", "function": {"name": _named(choice, found.client)}}
    elif tool_choice is not None:
        choice.choice("none", "auto", "required")
    return ChatTools(
        [found.chat[index] for index in indexes],
        [found.paths[index] for index in indexes],
        mode,
        found.client,
        found.left_out,
    )


def _parameters(reader: FieldReader) -> dict[str, Any]:
    """Returns a function, without its name."""
    function = read_definition(reader, "parameters", "output_schema", "async")
    reader.under("output_schema").reject_unless(reason="describe the output in the description")
    reader.under("async").reject_unless(False, reason="calls are synchronous")
    del function["name"]
    if reader.under("parameters").optional(dict) is not None:
        function["parameters"] = reader.value["parameters"]
    return function


def _allowed(choice: FieldReader, tools: Container[str]) -> set[str]:
    choice.fields("type", "mode", "tools")
    choice.under("mode").choice("auto", "required")
    allowed = {_named(reader, tools) for reader in choice.under("tools").items() if not _hosted(reader.value)}
    if not allowed:
        raise choice.under("tools").invalid("must name at least one tool that can run here")
    return allowed


def _hosted(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and _HOSTED_TOOL.match(kind) is not None


def _named(reader: FieldReader, tools: Container[str]) -> str:
    reader.reject_other_kinds(("function", "custom"), lambda kind: "tools are hosted by OpenAI; name a function")
    reader.kind("function", "custom")
    reader.fields("type", "name", "namespace")
    name = function_name(reader.under("namespace").optional(str) or "", reader.under("name").text(empty=False))
    if name not in tools:
        raise reader.under("name").invalid(f"names {name[:64]!r}, which is not among tools")
    return name
