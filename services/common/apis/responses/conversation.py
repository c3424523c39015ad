"""Translates items to chat messages, with the path of the item that each message comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.common.apis.responses.custom_tools import arguments_of
from services.common.apis.responses.items import MEDIA_PARTS, Item, reasoning_text, summary_of, user_message
from services.common.apis.responses.tools import function_name
from services.common.base.errors import invalid

SUMMARIZE = """\
Summarize the conversation above for the assistant that continues it, which sees only the user's messages and this
summary: what was asked, what was decided and done, with the names, paths, values and results that matter, what is left
to do, and what is known to fail. Answer with the summary only."""

_SYSTEM = ("system", "developer")
CALLS = ("function_call", "custom_tool_call")
SUMMARY = "A summary of the conversation so far:"


def with_instruction(items: Sequence[Item]) -> list[Item]:
    """Returns the items of a conversation, followed by the request for its summary."""
    return [*items, Item(user_message(SUMMARIZE), "input")]


@dataclass(slots=True)
class Conversation:
    """Chat messages and, for each, the path of its first item.

    Attributes:
        head: number of leading system messages.
        continues: the last message is the assistant's, and not complete: the model continues it.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    head: int = 0
    continues: bool = False

    def add(self, message: dict[str, Any], path: str) -> None:
        self.messages.append(message)
        self.paths.append(path)

    @property
    def parts(self) -> dict[str, str]:
        """The client's paths of the content parts of messages with media items, by the chat's."""
        return {
            f"messages[{index}].content[{at}]": f"{path}.{'output' if message['role'] == 'tool' else 'content'}[{at}]"
            for index, (message, path) in enumerate(zip(self.messages, self.paths, strict=True))
            if isinstance(message["content"], list) and "[" in path  # stored items have no part in this request
            for at in range(len(message["content"]))
        }

    def without_oldest(self, turns: int) -> Conversation:
        """Returns the conversation without its oldest turns, which start with user messages; keeps system messages."""
        starts = self.turn_starts()
        cut = starts[turns]
        return replace(
            self,
            messages=self.messages[: self.head] + self.messages[cut:],
            paths=self.paths[: self.head] + self.paths[cut:],
        )

    def turn_starts(self) -> list[int]:
        """Returns the message indexes at which turns start, first that of the oldest turn."""
        users = [
            index
            for index, message in enumerate(self.messages)
            if index > self.head and message["role"] == "user" and self.messages[index - 1]["role"] != "user"
        ]
        return [self.head, *users]


def conversation(instructions: str | None, items: Iterable[Item]) -> Conversation:
    """Returns the chat of instructions and items.

    Raises:
        SluiceError: INVALID_ARGUMENT for the output of a call that no earlier item has.
    """
    chat = Conversation()
    calls: set[str] = set()
    last: dict[str, Any] = {}
    if instructions:
        chat.add({"role": "system", "content": instructions}, "instructions")
    for item in items:
        last = item.stored
        call_id = last.get("call_id")
        if item.stored["type"] in CALLS:
            calls.add(item.stored["call_id"])
        elif call_id is not None and call_id not in calls:
            raise invalid(
                f"{item.path} is the output of call {call_id[:80]!r}, which no earlier item has; send the call too.",
                param=f"{item.path}.call_id",
                code="call_not_found",
            )
        _add(chat, item)
    _join(chat.messages)
    chat.continues = last.get("role") == "assistant" and last["status"] == "incomplete"
    roles = [message["role"] for message in chat.messages]
    chat.head = next((index for index, role in enumerate(roles) if role not in _SYSTEM), len(roles))
    return chat


def _join(messages: list[dict[str, Any]]) -> None:
    """Joins the text lists that `_add` collects, so that merging items takes linear time."""
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])


def _add(chat: Conversation, item: Item) -> None:
    stored = item.stored
    kind = stored["type"]
    if kind in ("function_call_output", "custom_tool_call_output"):
        content = stored["output"]
        text = content if isinstance(content, str) else _output(content)
        chat.add({"role": "tool", "tool_call_id": stored["call_id"], "content": text}, item.path)
    elif kind == "compaction":
        chat.add({"role": "user", "content": f"{SUMMARY}\n\n{summary_of(stored)}"}, item.path)
    elif kind == "reasoning":
        message = _assistant_message(chat, item, new=True)
        message.setdefault("reasoning_content", []).append(reasoning_text(stored))
    elif kind in CALLS:
        message = _assistant_message(chat, item, new=False)
        message.setdefault("tool_calls", []).append(_call(stored))
    elif stored["role"] == "assistant":
        _assistant_message(chat, item, new=True)["content"] = _joined(stored["content"])
    else:
        _add_message(chat, item)


def _call(stored: dict[str, Any]) -> dict[str, Any]:
    custom = stored["type"] == "custom_tool_call"
    arguments = arguments_of(stored["input"]) if custom else stored["arguments"]
    name = function_name(stored.get("namespace", ""), stored["name"])
    return {"id": stored["call_id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _assistant_message(chat: Conversation, item: Item, new: bool) -> dict[str, Any]:
    """Returns the assistant message that an item belongs to.

    Args:
        new: start a message unless the last one holds only reasoning.
    """
    last = chat.messages[-1] if chat.messages else {}
    continues = last.get("role") == "assistant"
    if new:
        continues = continues and not last.get("tool_calls") and last["content"] == ""
    if not continues:
        chat.add({"role": "assistant", "content": ""}, item.path)
    return chat.messages[-1]


def _add_message(chat: Conversation, item: Item) -> None:
    role, parts = item.stored["role"], item.stored["content"]
    chat.add({"role": role, "content": _content(parts) if role == "user" else _joined(parts)}, item.path)


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Returns the text of a single part, or as many parts of a chat message."""
    if len(parts) == 1 and parts[0]["type"] not in MEDIA_PARTS:
        return _joined(parts)
    return [part if part["type"] == "input_audio" else _chat_part(part) for part in parts]


def _output(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Returns the output of a call: a text, or parts if there are media items among them."""
    return _content(parts) if any(part["type"] in MEDIA_PARTS for part in parts) else _joined(parts)


def _chat_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "input_image":
        return {"type": "text", "text": _joined([part])}
    detail = {"detail": part["detail"]} if "detail" in part else {}
    return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}


def _joined(parts: list[dict[str, Any]]) -> str:
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)
