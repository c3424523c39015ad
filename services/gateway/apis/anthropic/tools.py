"""Translates Anthropic's tools and tool_choice to those of a chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.common.budgets import Budget
from services.gateway.apis.anthropic.blocks import check_cache_control
from services.gateway.apis.common.field_reader import FieldReader
from services.gateway.apis.common.tool_definitions import read_definition


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The chat's tools, its tool_choice, and whether parallel tool calls are allowed."""

    chat: list[dict[str, Any]]
    choice: Any
    parallel: bool


def read_tools(tools: list[Any], tool_choice: Any, list_items: Budget) -> ChatTools:
    """Returns the validated tools; raises SluiceError(INVALID_ARGUMENT) for invalid and Anthropic-hosted tools."""
    chat: list[dict[str, Any]] = []
    names: set[str] = set()
    for reader in FieldReader(tools, "tools", ".", list_items).items():
        tool = _tool(reader)
        name = tool["function"]["name"]
        if name in names:
            raise reader.under("name").invalid("repeats the name of another tool; names must be unique")
        names.add(name)
        chat.append(tool)
    if tool_choice is None:
        return ChatTools(chat, None, True)
    return _with_choice(chat, names, FieldReader(tool_choice, "tool_choice", ".", list_items))


def _tool(reader: FieldReader) -> dict[str, Any]:
    reader.reject_other_kinds(
        ("custom",),
        lambda kind: "tools are hosted by Anthropic; describe the tool with a name and an input_schema",
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


def _with_choice(chat: list[dict[str, Any]], names: set[str], choice: FieldReader) -> ChatTools:
    kind = choice.kind("auto", "any", "tool", "none")
    allowed = {"tool": ("type", "name", "disable_parallel_tool_use"), "none": ("type",)}
    choice.fields(*allowed.get(kind, ("type", "disable_parallel_tool_use")))
    parallel = kind == "none" or not choice.under("disable_parallel_tool_use").optional(bool)
    if kind == "tool":
        name = choice.under("name")
        if name.text(empty=False) not in names:
            raise name.invalid(f"is {name.value[:64]!r}, which is not among tools")
        return ChatTools(chat, {"type": "function", "function": {"name": name.value}}, parallel)
    if kind == "any" and not chat:
        raise choice.invalid("requires a tool call, but tools is empty")
    return ChatTools(chat, {"auto": "auto", "any": "required", "none": "none"}[kind], parallel)
