"""The chat that a request of the Responses API is answered as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.apis.prompts import continued
from services.common.apis.responses.conversation import Conversation, conversation
from services.common.apis.responses.items import read_items
from services.common.apis.responses.tools import ChatTools, read_tools
from services.common.base.budgets import Budget
from services.common.base.errors import invalid

_HISTORY = ("previous_response_id", "conversation")


def chat_fields(chat: Conversation, tools: ChatTools, effort: str | None) -> dict[str, Any]:
    """Returns the fields of a chat completion that decide its prompt, without arguments of the template.

    Args:
        effort: of reasoning; None: not set.
    """
    fields: dict[str, Any] = {"messages": chat.messages, **continued(chat.continues)}
    if tools.chat:
        fields["tools"] = list(tools.chat)
    if tools.choice is not None:
        fields["tool_choice"] = tools.choice
    if effort is not None:
        fields["reasoning_effort"] = effort
    return fields


def read_chat(body: Mapping[str, Any], list_items: Budget) -> dict[str, Any]:
    """Returns the fields of a chat completion that a whole body, which needs no store, is answered as.

    Raises:
        SluiceError: INVALID_ARGUMENT for an invalid body, and for one that continues what only a gateway stores.
    """
    for name in _HISTORY:
        if body.get(name) is not None:
            raise invalid(f"{name} names a conversation that is not in the request.", param=name)
    items = read_items(body.get("input"), list_items).items
    if any(item.stored["type"] == "item_reference" for item in items):
        raise invalid("input refers to an item that is not in the request.", param="input")
    instructions, reasoning = body.get("instructions"), body.get("reasoning")
    chat = conversation(instructions if isinstance(instructions, str) else None, items)
    tools = read_tools(body.get("tools"), body.get("tool_choice"), list_items)
    fields = chat_fields(chat, tools, reasoning.get("effort") if isinstance(reasoning, Mapping) else None)
    return {**fields, "chat_template_kwargs": body.get("chat_template_kwargs")}
