"""The fields of an OpenAI chat body that determine the prompt; sampling fields come with the request itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from services.common.base.errors import invalid
from services.common.net.intake.json_intake import foreign_json
from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.contract.validation import checked_chat

T = TypeVar("T")
MEDIA_PARTS = ("image", "audio", "video", "image_url", "input_audio", "video_url")


@dataclass(frozen=True, slots=True)
class ChatRequestBody:
    """A chat, and whether the model may make several tool calls in parallel."""

    chat: ChatRequest
    parallel_tool_calls: bool = True


def read_body(document: bytes) -> ChatRequestBody:
    """Parses and validates a body; fields that do not determine the prompt are ignored.

    Raises:
        SluiceError: INVALID_ARGUMENT with the invalid field.
    """
    body = foreign_json(document, "messages_json")
    if not isinstance(body, dict):
        raise invalid(
            'messages_json must be an object with "messages", like the body of a chat request.', param="messages_json"
        )
    _refuse_media(body.get("messages"))
    chat = checked_chat(
        body.get("messages"),
        body.get("tools"),
        _template_kwargs(body),
        body.get("documents"),
        body.get("tool_choice"),
        chat_template=_field(body, "chat_template", str, "a string") or "",
        add_generation_prompt=_field(body, "add_generation_prompt", bool, "true or false"),
        continue_final_message=bool(_field(body, "continue_final_message", bool, "true or false")),
    )
    return ChatRequestBody(chat, _field(body, "parallel_tool_calls", bool, "true or false") is not False)


def _refuse_media(messages: Any) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) for a part that is an image, audio or a video."""
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") in MEDIA_PARTS:
                where = f"messages[{number}].content[{index}]"
                raise invalid(
                    f"{where} is a media item, and the worker tokenizes text only; send token ids and their media.",
                    param=where,
                )


def _template_kwargs(body: dict[str, Any]) -> Any:
    """Returns the template variables, which include the reasoning effort."""
    kwargs, effort = body.get("chat_template_kwargs"), _field(body, "reasoning_effort", str, "a string")
    if effort is None or not isinstance(kwargs, dict | None):
        return kwargs
    return {"reasoning_effort": effort, **(kwargs or {})}


def _field(body: dict[str, Any], name: str, kind: type[T], expected: str) -> T | None:
    value = body.get(name)
    if value is None or isinstance(value, kind):
        return value
    raise invalid(f"{name} must be {expected}.", param=name)
