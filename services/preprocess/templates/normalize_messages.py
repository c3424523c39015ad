"""Messages as the client wrote them → messages as chat templates expect them."""

from __future__ import annotations

from enum import Enum
from typing import Any

import orjson

from services.preprocess.protocol import Message

# Clients write one, templates read one or the other.
_REASONING = (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning"))


class ContentFormat(Enum):
    """The form of messages' content that a template is written for."""

    STRING = "string"
    PARTS = "parts"
    EITHER = "either"


def as_templates_expect(messages: list[Message], content_format: ContentFormat) -> list[Message]:
    """Copies in which content has the template's form, tool arguments are objects and reasoning has both its names.

    Args:
        messages: checked OpenAI messages.
        content_format: for strings, the texts of parts are joined by line breaks; for parts, a text becomes one.
    """
    return [_as_template_expects(message, content_format) for message in messages]


def _as_template_expects(message: Message, content_format: ContentFormat) -> Message:
    content = message.get("content")
    changed = dict(message)
    if content is None:
        changed["content"] = ""
    elif isinstance(content, str):
        if content_format is ContentFormat.PARTS:
            changed["content"] = [{"type": "text", "text": content}]
    elif content_format is ContentFormat.STRING:
        changed["content"] = "\n".join(text for part in content if (text := part[part["type"]]))
    if message["role"] == "assistant":
        _adapt_answer(changed)
    return changed


def _adapt_answer(message: Message) -> None:
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{**call, "function": _parsed_arguments(call["function"])} for call in calls]
    for name, other in _REASONING:
        if name in message:
            message.setdefault(other, message[name])


def _parsed_arguments(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        return function
    try:
        parsed = orjson.loads(arguments) if arguments else {}
    except orjson.JSONDecodeError:
        return function  # what a model once made may be broken; the template then sees the text
    return {**function, "arguments": parsed} if isinstance(parsed, dict) else function
