"""Messages as the client wrote them → messages as chat templates expect them."""

from __future__ import annotations

from typing import Any

import orjson

from services.preprocess.tokenizer import Message


def as_templates_expect(messages: list[Message], wants_parts: bool) -> list[Message]:
    """Copies in which content is what the template walks over and tool arguments are objects, not JSON.

    Args:
        messages: checked OpenAI messages.
        wants_parts: the template walks over content parts; otherwise their texts are joined by line breaks.
    """
    return [_as_template_expects(message, wants_parts) for message in messages]


def _as_template_expects(message: Message, wants_parts: bool) -> Message:
    content = message.get("content")
    changed = dict(message)
    if content is None:
        changed["content"] = ""
    elif not isinstance(content, str) and not wants_parts:
        changed["content"] = "\n".join(part[part["type"]] for part in content)
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "function": _parsed_arguments(call["function"])} for call in calls]
    return changed


def _parsed_arguments(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        return function
    try:
        parsed = orjson.loads(arguments) if arguments else {}
    except orjson.JSONDecodeError:
        return function  # what a model once made may be broken; the template then sees the text
    return {**function, "arguments": parsed} if isinstance(parsed, dict) else function
