"""Translates the tools and tool_choice of the Responses API to those of a chat."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from services.common.budgets import Budget
from services.gateway.apis.common.field_reader import FieldReader
from services.gateway.apis.common.tool_definitions import read_definition


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
    reader.reject_other_kinds(("function",), lambda kind: "tools are hosted by OpenAI; describe the tool as a function")
    reader.kind("function")
    function = read_definition(reader, "parameters", "output_schema", "async")
    reader.under("output_schema").reject_unless(reason="describe the output in the description")
    reader.under("async").reject_unless(False, reason="calls are synchronous")
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
    reader.reject_other_kinds(("function",), lambda kind: "tools are hosted by OpenAI; name a function")
    reader.kind("function")
    name = reader.fields("type", "name").under("name")
    if name.text(empty=False) not in names:
        raise name.invalid(f"names {name.value[:64]!r}, which is not among tools")
    return str(name.value)
