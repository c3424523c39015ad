"""Converts the content of messages from the client's form to the one that a chat template expects."""

from __future__ import annotations

from enum import Enum
from typing import Any

from services.common.base.budgets import Budget
from services.common.base.errors import invalid
from services.common.net.intake.json_intake import MAX_VALUES
from services.common.net.intake.json_scan import Scan
from services.common.net.intake.json_values import too_many_values
from services.preprocess.contract.tokenizer import Message
from services.preprocess.contract.validation import MEDIA_PARTS

_VALUES = Budget("body_values", MAX_VALUES, "")


class ContentFormat(Enum):
    """The form of message content that a template expects."""

    STRING = "string"
    PARTS = "parts"
    EITHER = "either"


def as_templates_expect(messages: list[Message], content_format: ContentFormat) -> list[Message]:
    """Returns the messages with content in the template's form; those that have it already are not copied.

    Args:
        content_format: for strings, text parts are joined by line breaks; for parts, a string becomes one part.
    """
    parts = content_format is ContentFormat.PARTS
    return [
        message if message["content"].__class__ is str and not parts else _in_form(message, content_format)
        for message in messages
    ]


def check_arguments(messages: list[Message]) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) for tool arguments with too many values, all together.

    They are JSON in strings, where the values of a body are not counted.
    """
    left = MAX_VALUES
    for message in messages:
        for call in message.get("tool_calls") or () if message["role"] == "assistant" else ():
            arguments = call["function"].get("arguments")
            if not isinstance(arguments, str):
                continue
            scan = Scan(arguments.encode(errors="replace"), left, None)
            for _ in scan.slices():
                pass
            if scan.too_many:
                raise too_many_values(_VALUES, "The arguments of tool calls", "messages")
            left -= scan.weight


def _in_form(message: Message, content_format: ContentFormat) -> Message:
    content = message["content"]
    if content is None:
        return message
    shown: Any
    if isinstance(content, str) or not content:
        shown = [{"type": "text", "text": content or ""}] if content_format is ContentFormat.PARTS else ""
    elif content_format is ContentFormat.STRING:
        shown = "\n".join(text for part in content if (text := _text_of(part)))
    elif any(part["type"] in MEDIA_PARTS for part in content):
        shown = [{"type": part["type"]} if part["type"] in MEDIA_PARTS else part for part in content]
    else:
        return message
    return {**message, "content": shown}


def _text_of(part: dict[str, Any]) -> str:
    if part["type"] in MEDIA_PARTS:
        raise invalid(
            "The chat template of this model shows text only; leave the media out.",
            param="messages",
            code="media_not_supported",
        )
    text: str = part[part["type"]]
    return text
