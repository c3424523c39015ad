"""Translates the tools and tool_choice of the Responses API to those of a chat."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from services.common.budgets import Budget
from services.gateway.apis.common.field_reader import FieldReader

NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools that the model may call.

    Attributes:
        chat: the tools of the chat request.
        paths: the path of each in the client's request.
        choice: the tool_choice of the chat request.
    """

    chat: Sequence[dict[str, Any]]
    paths: Sequence[str]
    choice: Any


def read_tools(tools: list[Any] | None, tool_choice: Any, list_items: Budget) -> ChatTools:
    """Returns the validated tools; raises SluiceError(INVALID_ARGUMENT) for invalid and OpenAI-hosted tools."""
    chat = []
    paths = []
    for reader in FieldReader(tools or [], "tools", "[]", list_items).items():
        chat.append(_function(reader))
        paths.append(reader.path)
    names = {tool["function"]["name"] for tool in chat}
    choice = FieldReader(tool_choice, "tool_choice", "[]", list_items)
    if not isinstance(tool_choice, dict):
        if tool_choice is not None:
            choice.choice("none", "auto", "required")
        return ChatTools(chat, paths, tool_choice)
    if choice.under("type").value == "allowed_tools":
        allowed = _allowed(choice, names)
        indexes = [index for index, tool in enumerate(chat) if tool["function"]["name"] in allowed]
        return ChatTools([chat[index] for index in indexes], [paths[index] for index in indexes], tool_choice["mode"])
    return ChatTools(chat, paths, {"type": "function", "function": {"name": _named(choice, names)}})


def _function(reader: FieldReader) -> dict[str, Any]:
    kind = reader.value.get("type") if isinstance(reader.value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise reader.under("type").unsupported(
            f"{kind[:64]!r} tools are hosted by OpenAI; describe the tool as a function"
        )
    reader.kind("function")
    reader.fields(
        "type",
        "name",
        "description",
        "parameters",
        "strict",
        "defer_loading",
        "allowed_callers",
        "output_schema",
        "async",
    )
    reader.under("defer_loading").reject_unless(False, reason="Sluice has no tool search")
    reader.under("allowed_callers").reject_unless(["direct"], reason="tools cannot be called by code")
    reader.under("output_schema").reject_unless(reason="describe the output in the description")
    reader.under("async").reject_unless(False, reason="calls are synchronous")
    reader.under("strict").optional(bool)
    name = reader.under("name")
    if not NAME.fullmatch(name.text()):
        raise name.invalid("must be 1 to 128 letters, digits, underscores and dashes")
    function = {"name": name.value}
    if reader.under("description").optional(str) is not None:
        function["description"] = reader.value["description"]
    if reader.under("parameters").optional(dict) is not None:
        function["parameters"] = reader.value["parameters"]
    return {"type": "function", "function": function}


def _allowed(choice: FieldReader, names: Set[str]) -> set[str]:
    choice.fields("type", "mode", "tools")
    choice.under("mode").choice("auto", "required")
    allowed = {_named(reader, names) for reader in choice.under("tools").items()}
    if not allowed:
        raise choice.under("tools").invalid("must name at least one tool")
    return allowed


def _named(reader: FieldReader, names: Set[str]) -> str:
    kind = reader.value.get("type") if isinstance(reader.value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise reader.under("type").unsupported(f"{kind[:64]!r} tools are hosted by OpenAI; name a function")
    reader.kind("function")
    name = reader.fields("type", "name").under("name")
    if name.text(empty=False) not in names:
        raise name.invalid(f"names {name.value[:64]!r}, which is not among tools")
    return str(name.value)
