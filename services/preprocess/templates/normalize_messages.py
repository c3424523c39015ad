"""Converts messages from the client's form to the one chat templates expect."""

from __future__ import annotations

from enum import Enum
from typing import Any

import orjson

from services.common.errors import invalid
from services.preprocess.protocol import Message
from services.preprocess.validation import MEDIA_PARTS

# Clients send either name; templates read either.
_REASONING = (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning"))


class ContentFormat(Enum):
    """The form of message content that a template expects."""

    STRING = "string"
    PARTS = "parts"
    EITHER = "either"


def as_templates_expect(messages: list[Message], content_format: ContentFormat) -> list[Message]:
    """Returns copies with content in the template's form, tool arguments as objects and reasoning under both names.

    Args:
        messages: checked OpenAI messages.
        content_format: for strings, text parts are joined by line breaks; for parts, a string becomes one part.
    """
    return [_normalize(message, content_format) for message in messages]


def _normalize(message: Message, content_format: ContentFormat) -> Message:
    content = message.get("content")
    normalized = dict(message)
    if content is None:
        normalized["content"] = ""
    elif isinstance(content, str):
        if content_format is ContentFormat.PARTS:
            normalized["content"] = [{"type": "text", "text": content}]
    elif content_format is ContentFormat.STRING:
        normalized["content"] = "\n".join(text for part in content if (text := _text_of(part)))
    elif any(part["type"] in MEDIA_PARTS for part in content):
        normalized["content"] = [{"type": part["type"]} if part["type"] in MEDIA_PARTS else part for part in content]
    if message["role"] == "assistant":
        _adapt_assistant(normalized)
    return normalized


def _text_of(part: dict[str, Any]) -> str:
    if part["type"] in MEDIA_PARTS:
        raise invalid(
            "The chat template of this model shows text only; leave the media out.",
            param="messages",
            code="media_not_supported",
        )
    text: str = part[part["type"]]
    return text


def _adapt_assistant(message: Message) -> None:
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
        return function  # a model's output may be invalid JSON; pass it to the template as a string
    return {**function, "arguments": parsed} if isinstance(parsed, dict) else function
