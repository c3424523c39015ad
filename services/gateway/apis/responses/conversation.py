"""Items as a chat: which messages they make, and where each message comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from services.gateway.apis.responses.items import Item, reasoning_text


@dataclass(slots=True)
class Conversation:
    """Messages of a chat and, for each, the path of the item that it begins with."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    head: int = 0  # how many of the first messages are the system's

    def add(self, message: dict[str, Any], path: str) -> None:
        """One more message."""
        self.messages.append(message)
        self.paths.append(path)

    def without_oldest(self, turns: int) -> Conversation:
        """The same without the oldest turns; the system's messages stay. A turn begins with a user's message."""
        starts = self.turn_starts()
        cut = starts[turns]
        return Conversation(
            self.messages[: self.head] + self.messages[cut:], self.paths[: self.head] + self.paths[cut:], self.head
        )

    def turn_starts(self) -> list[int]:
        """Where the turns begin that can be cut off before; the first is the beginning."""
        users = [
            index
            for index, message in enumerate(self.messages)
            if index > self.head and message["role"] == "user" and self.messages[index - 1]["role"] != "user"
        ]
        return [self.head, *users]


def conversation(instructions: str | None, items: Iterable[Item]) -> Conversation:
    """The chat of instructions and items; the system's and developer's messages at the beginning become one."""
    made = Conversation()
    if instructions:
        made.add({"role": "system", "content": [instructions]}, "instructions")
    for item in items:
        _add(made, item)
    _join(made.messages)
    made.head = int(bool(made.messages) and made.messages[0]["role"] == "system")
    return made


def _join(messages: list[dict[str, Any]]) -> None:
    """Makes texts of what `_add` keeps as lists: items that become one message would each copy what came before."""
    for message in messages:
        if message["role"] == "system":
            message["content"] = "\n\n".join(message["content"])
        elif "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])


def _add(made: Conversation, item: Item) -> None:
    stored = item.stored
    kind = stored["type"]
    if kind == "function_call_output":
        content = stored["output"]
        text = content if isinstance(content, str) else _joined(content)
        made.add({"role": "tool", "tool_call_id": stored["call_id"], "content": text}, item.path)
    elif kind == "reasoning":
        answer = _answer(made, item, fresh=True)
        answer.setdefault("reasoning_content", []).append(reasoning_text(stored))
    elif kind == "function_call":
        answer = _answer(made, item, fresh=False)
        answer.setdefault("tool_calls", []).append(
            {
                "id": stored["call_id"],
                "type": "function",
                "function": {"name": stored["name"], "arguments": stored["arguments"]},
            }
        )
    elif stored["role"] == "assistant":
        _answer(made, item, fresh=True)["content"] = _joined(stored["content"])
    else:
        _add_message(made, item)


def _answer(made: Conversation, item: Item, fresh: bool) -> dict[str, Any]:
    """The assistant's message that an item belongs to; a fresh one unless so far it only has reasoning."""
    last = made.messages[-1] if made.messages else {}
    continues = last.get("role") == "assistant"
    if fresh:
        continues = continues and not last.get("tool_calls") and last["content"] == ""
    if not continues:
        made.add({"role": "assistant", "content": ""}, item.path)
    return made.messages[-1]


def _add_message(made: Conversation, item: Item) -> None:
    text = _joined(item.stored["content"])
    if item.stored["role"] == "user":
        made.add({"role": "user", "content": text}, item.path)
    elif len(made.messages) == 1 and made.messages[0]["role"] == "system":
        made.messages[0]["content"].append(text)
    else:
        made.add({"role": "system", "content": [text]}, item.path)


def _joined(parts: list[dict[str, Any]]) -> str:
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)
