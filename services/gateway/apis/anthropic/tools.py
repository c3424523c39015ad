"""Anthropic's tools and tool_choice as those of a chat."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from services.common.budgets import Budget
from services.gateway.apis.anthropic.blocks import check_mark
from services.gateway.apis.common.field_reader import FieldReader

NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tools:
    """The chat's tools, its tool_choice, and whether several calls may be made at once."""

    chat: list[dict[str, Any]]
    choice: Any
    parallel: bool


def read_tools(tools: list[Any], tool_choice: Any, list_items: Budget) -> Tools:
    """Checked tools; SluiceError(INVALID_ARGUMENT) names what is wrong, or what only Anthropic can run."""
    chat: list[dict[str, Any]] = []
    names: set[str] = set()
    for place in FieldReader(tools, "tools", ".", list_items).items():
        tool = _tool(place)
        name = tool["function"]["name"]
        if name in names:
            raise place.under("name").wrong("is that of another tool; names must be unique")
        names.add(name)
        chat.append(tool)
    if tool_choice is None:
        return Tools(chat, None, True)
    return _chosen(chat, names, FieldReader(tool_choice, "tool_choice", ".", list_items))


def _tool(place: FieldReader) -> dict[str, Any]:
    kind = place.value.get("type") if isinstance(place.value, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise place.under("type").unsupported(
            f"{kind[:64]!r} cannot run here; describe the tool with a name and an input_schema"
        )
    place.fields(
        "type",
        "name",
        "description",
        "input_schema",
        "cache_control",
        "strict",
        "input_examples",
        "eager_input_streaming",
        "defer_loading",
        "allowed_callers",
    )
    place.under("type").optional(str)
    check_mark(place)
    place.under("defer_loading").ignored(False, why="there is no tool search here")
    place.under("allowed_callers").ignored(["direct"], why="programs do not call tools here")
    place.under("input_examples").ignored([], why="give examples in the description")
    place.under("strict").optional(bool)
    place.under("eager_input_streaming").optional(bool)
    name = place.under("name")
    if not NAME.fullmatch(name.text()):
        raise name.wrong("must be 1 to 128 letters, digits, underscores and dashes")
    schema = place.under("input_schema")
    if schema.optional(dict) is None:
        raise schema.wrong("is missing")
    if schema.value.get("type") != "object":
        raise schema.under("type").wrong("must be 'object'")
    function = {"name": name.value, "parameters": schema.value}
    if place.under("description").optional(str) is not None:
        function["description"] = place.value["description"]
    return {"type": "function", "function": function}


def _chosen(chat: list[dict[str, Any]], names: set[str], choice: FieldReader) -> Tools:
    kind = choice.kind("auto", "any", "tool", "none")
    known = {"tool": ("type", "name", "disable_parallel_tool_use"), "none": ("type",)}
    choice.fields(*known.get(kind, ("type", "disable_parallel_tool_use")))
    parallel = kind == "none" or not choice.under("disable_parallel_tool_use").optional(bool)
    if kind == "tool":
        name = choice.under("name")
        if name.text(empty=False) not in names:
            raise name.wrong(f"is {name.value[:64]!r}, which is not among tools")
        return Tools(chat, {"type": "function", "function": {"name": name.value}}, parallel)
    if kind == "any" and not chat:
        raise choice.wrong("demands a tool, but tools is empty")
    return Tools(chat, {"auto": "auto", "any": "required", "none": "none"}[kind], parallel)
