"""The turns of a conversation, and their texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from services.preprocess.contract.tokenizer import Message

SYSTEM_AS_USER, CALLS_AS_TEXT, RESULTS_AS_USER = "system_as_user", "tool_calls_as_text", "tool_results_as_user"
LOOSE_ARGUMENTS, USER_IN_RESULT = "tool_arguments_not_an_object", "user_text_in_tool_result"
NOTES = (SYSTEM_AS_USER, CALLS_AS_TEXT, RESULTS_AS_USER, LOOSE_ARGUMENTS, USER_IN_RESULT)
"""What is shown in another place or form than the client's."""
_GAP = "\n\n"


class Turn(NamedTuple):
    """A message and the index of the client's message that it begins with."""

    origin: int
    message: Message


def plain_text(content: Any) -> str | None:
    """Returns content as text, parts joined by line breaks; None if it has media items."""
    if not content:
        return ""
    if isinstance(content, str):
        return content
    texts = [part.get(part["type"]) for part in content]
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else None


def joined(first: Any, second: Any, gap: str = _GAP) -> Any:
    """Returns two contents as one, with a gap between their texts."""
    one, two = plain_text(first), plain_text(second)
    if one is not None and two is not None:
        return f"{one}{gap}{two}" if one and two else one or two
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or ())


def united(messages: Iterable[Message]) -> Message:
    first, *others = messages
    content = first["content"]
    for other in others:
        content = joined(content, other["content"])
    return {**first, "content": content}


def reasoning_of(message: Message) -> str:
    return message.get("reasoning_content") or message.get("reasoning") or ""
