"""Tools and tool_choice of the Responses API as those of a chat."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from services.common.budgets import Budget
from services.gateway.apis.common.field_reader import FieldReader

NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tools:
    """What the model may call.

    Attributes:
        chat: the chat's tools.
        paths: where each comes from.
        choice: the chat's tool_choice.
    """

    chat: Sequence[dict[str, Any]]
    paths: Sequence[str]
    choice: Any


def read_tools(tools: list[Any] | None, tool_choice: Any, list_items: Budget) -> Tools:
    """Checked tools; SluiceError(INVALID_ARGUMENT) names what is wrong, or what only OpenAI can run."""
    chat = []
    paths = []
    for place in FieldReader(tools or [], "tools", "[]", list_items).items():
        chat.append(_function(place))
        paths.append(place.path)
    names = {tool["function"]["name"] for tool in chat}
    choice = FieldReader(tool_choice, "tool_choice", "[]", list_items)
    if not isinstance(tool_choice, dict):
        if tool_choice is not None:
            choice.choice("none", "auto", "required")
        return Tools(chat, paths, tool_choice)
    if choice.under("type").value == "allowed_tools":
        allowed = _allowed(choice, names)
        kept = [index for index, tool in enumerate(chat) if tool["function"]["name"] in allowed]
        return Tools([chat[index] for index in kept], [paths[index] for index in kept], tool_choice["mode"])
    return Tools(chat, paths, {"type": "function", "function": {"name": _named(choice, names)}})


def _function(place: FieldReader) -> dict[str, Any]:
    kind = place.value.get("type") if isinstance(place.value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise place.under("type").unsupported(f"{kind[:64]!r} cannot run here; describe it as a function")
    place.kind("function")
    place.fields(
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
    place.under("defer_loading").ignored(False, why="there is no tool search here")
    place.under("allowed_callers").ignored(["direct"], why="programs do not call tools here")
    place.under("output_schema").ignored(why="say in the description what the function answers")
    place.under("async").ignored(False, why="calls here are not asynchronous")
    place.under("strict").optional(bool)
    name = place.under("name")
    if not NAME.fullmatch(name.text()):
        raise name.wrong("must be 1 to 128 letters, digits, underscores and dashes")
    function = {"name": name.value}
    if place.under("description").optional(str) is not None:
        function["description"] = place.value["description"]
    if place.under("parameters").optional(dict) is not None:
        function["parameters"] = place.value["parameters"]
    return {"type": "function", "function": function}


def _allowed(choice: FieldReader, names: Set[str]) -> set[str]:
    choice.fields("type", "mode", "tools")
    choice.under("mode").choice("auto", "required")
    allowed = {_named(place, names) for place in choice.under("tools").items()}
    if not allowed:
        raise choice.under("tools").wrong("must name at least one tool")
    return allowed


def _named(place: FieldReader, names: Set[str]) -> str:
    kind = place.value.get("type") if isinstance(place.value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise place.under("type").unsupported(f"{kind[:64]!r} cannot run here; functions can")
    place.kind("function")
    name = place.fields("type", "name").under("name")
    if name.text(empty=False) not in names:
        raise name.wrong(f"names {name.value[:64]!r}, which is not among tools")
    return str(name.value)
