"""Translates Anthropic's tools and tool_choice to those of a chat."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from services.common.apis.anthropic.blocks import check_cache_control
from services.common.apis.field_reader import FieldReader
from services.common.apis.tool_definitions import read_definition
from services.common.base.budgets import Budget

HOSTED_TOOL = (
    "(advisor|bash|code_execution|computer|memory|text_editor|tool_search_tool_[a-z0-9]+|web_fetch|web_search)_[0-9]{8}"
)
"""Types of the tools that Anthropic runs or defines itself."""


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The chat's tools, its tool_choice, and whether parallel tool calls are allowed.

    Attributes:
        paths: the path of each tool in the client's request.
        left_out: types of the hosted tools, which are left out because they cannot run here.
    """

    chat: list[dict[str, Any]]
    paths: list[str]
    choice: Any
    parallel: bool
    left_out: list[str]


def read_tools(tools: list[Any], tool_choice: Any, references: Container[str], list_items: Budget) -> ChatTools:
    """Returns the validated tools; raises SluiceError(INVALID_ARGUMENT) for invalid ones.

    A deferred tool is one of them once a tool result refers to it, or if the client relies on a hosted tool search.

    Args:
        references: names of the deferred tools that tool results refer to.
    """
    chat: dict[str, tuple[dict[str, Any], FieldReader]] = {}
    left_out: list[str] = []
    for reader in FieldReader(tools, "tools", ".", list_items).items():
        kind = reader.value.get("type") if isinstance(reader.value, dict) else None
        if isinstance(kind, str) and re.fullmatch(HOSTED_TOOL, kind):
            left_out.append(kind)
            continue
        tool = _tool(reader)
        name = tool["function"]["name"]
        if name in chat:
            raise reader.under("name").invalid("repeats the name of another tool; names must be unique")
        chat[name] = tool, reader
    if not any(kind.startswith("tool_search_tool_") for kind in left_out):
        chat = {
            name: (tool, reader)
            for name, (tool, reader) in chat.items()
            if not reader.value.get("defer_loading") or name in references
        }
    paths = [reader.path for _, reader in chat.values()]
    found = ChatTools([tool for tool, _ in chat.values()], paths, None, True, left_out)
    if tool_choice is None:
        return found
    return _with_choice(found, chat, FieldReader(tool_choice, "tool_choice", ".", list_items))


def _tool(reader: FieldReader) -> dict[str, Any]:
    reader.reject_other_kinds(
        ("custom",),
        lambda kind: "tools are unknown here; describe the tool with a name and an input_schema",
    )
    function = read_definition(reader, "input_schema", "cache_control", "input_examples", "eager_input_streaming")
    reader.under("type").optional(str)
    check_cache_control(reader)
    reader.under("input_examples").reject_unless([], reason="give examples in the description")
    reader.under("eager_input_streaming").optional(bool)
    schema = reader.under("input_schema")
    if schema.optional(dict) is None:
        raise schema.invalid("is missing")
    if schema.value.get("type") != "object":
        raise schema.under("type").invalid("must be 'object'")
    return {"type": "function", "function": {**function, "parameters": schema.value}}


def _with_choice(tools: ChatTools, names: Container[str], choice: FieldReader) -> ChatTools:
    kind = choice.kind("auto", "any", "tool", "none")
    allowed = {"tool": ("type", "name", "disable_parallel_tool_use"), "none": ("type",)}
    choice.fields(*allowed.get(kind, ("type", "disable_parallel_tool_use")))
    parallel = kind == "none" or not choice.under("disable_parallel_tool_use").optional(bool)
    if kind == "tool":
        name = choice.under("name")
        if name.text(empty=False) not in names:
            raise name.invalid(f"is {name.value[:64]!r}, which is not among tools")
        return replace(tools, choice={"type": "function", "function": {"name": name.value}}, parallel=parallel)
    if kind == "any" and not tools.chat:
        raise choice.invalid("requires a tool call, but tools is empty")
    return replace(tools, choice={"auto": "auto", "any": "required", "none": "none"}[kind], parallel=parallel)
