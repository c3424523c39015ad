"""The chat that a request of the Messages API is answered as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.common.apis.anthropic.blocks import Chat
from services.common.apis.anthropic.blocks import read_chat as read_blocks
from services.common.apis.anthropic.tools import ChatTools, read_tools
from services.common.apis.prompts import THINKING_SWITCHES, continued
from services.common.base.budgets import Budget
from services.common.types.media.parts import MediaInput, MediaLimits


def chat_fields(
    chat: Chat, tools: ChatTools, effort: str | None, thinks: bool | None, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the fields of a chat completion that decide its prompt.

    Args:
        effort: of reasoning; None: not set.
        thinks: whether thinking is requested; None: the template is not told.
        kwargs: the client's own arguments of the template.
    """
    fields: dict[str, Any] = {"messages": chat.messages, **continued(chat.continues)}
    if tools.chat:
        fields["tools"] = tools.chat
    if tools.choice is not None:
        fields["tool_choice"] = tools.choice
    if effort is not None:
        fields["reasoning_effort"] = effort
    switches = {} if thinks is None else dict.fromkeys(THINKING_SWITCHES, thinks)
    if switches or kwargs:
        fields["chat_template_kwargs"] = {**switches, **kwargs}
    return fields


def read_chat(
    body: Mapping[str, Any], list_items: Budget, limits: MediaLimits
) -> tuple[dict[str, Any], Sequence[MediaInput]]:
    """Returns the fields of a chat completion that a body is answered as, and the media items of its messages.

    Raises:
        SluiceError: INVALID_ARGUMENT or TOO_LARGE for an invalid body.
    """
    chat = read_blocks(body.get("system"), body["messages"], list_items, limits)
    tools = read_tools(body.get("tools") or [], body.get("tool_choice"), chat.references, list_items)
    thinking, config, kwargs = (_object(body, name) for name in ("thinking", "output_config", "chat_template_kwargs"))
    thinks = thinking.get("type", "disabled") != "disabled"
    return chat_fields(chat, tools, config.get("effort"), thinks, kwargs), chat.media


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    return value if isinstance(value, Mapping) else {}
