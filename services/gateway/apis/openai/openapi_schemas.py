"""OpenAPI schemas of fields that are validated outside pydantic, here or by preprocess."""

from __future__ import annotations

from services.gateway.apis.json_schemas import (
    NON_EMPTY,
    NULL,
    STRING,
    STRING_OR_NULL,
    Schema,
    any_of,
    array,
    const,
    open_object,
)

_TEXTS = array(open_object({"type": const("text"), "text": STRING}, "type", "text"))
_CONTENT = any_of(STRING, _TEXTS)
_IMAGE_URL = open_object({"url": STRING, "detail": {"enum": ["auto", "low", "high", None]}}, "url")
_AUDIO = open_object({"data": STRING, "format": {"enum": ["wav", "mp3", "flac", "ogg"]}}, "data", "format")
_PARTS = array(
    any_of(
        open_object({"type": const("text"), "text": STRING}, "type", "text"),
        open_object({"type": const("image_url"), "image_url": any_of(_IMAGE_URL, STRING)}, "type", "image_url"),
        open_object({"type": const("video_url"), "video_url": any_of(_IMAGE_URL, STRING)}, "type", "video_url"),
        open_object({"type": const("input_audio"), "input_audio": _AUDIO}, "type", "input_audio"),
    )
)
_CONTENT_WITH_MEDIA = any_of(STRING, _PARTS)
_FUNCTION = open_object({"name": NON_EMPTY, "arguments": {"type": ["string", "object", "null"]}}, "name")
_CALL = open_object({"id": STRING_OR_NULL, "type": const("function"), "function": _FUNCTION}, "function")
_NAMED = open_object({"name": NON_EMPTY}, "name")
_CALLS = any_of(array(_CALL, minItems=1), NULL)


def _message(roles: list[str], fields: dict[str, Schema], *required: str) -> Schema:
    return open_object({"role": {"enum": roles}, "name": STRING_OR_NULL, **fields}, "role", *required)


MESSAGES: Schema = array(
    any_of(
        _message(["user"], {"content": _CONTENT_WITH_MEDIA}, "content"),
        _message(["system", "developer"], {"content": _CONTENT}, "content"),
        _message(
            ["assistant"],
            {"content": _CONTENT, "refusal": STRING_OR_NULL, "reasoning_content": STRING_OR_NULL},
            "content",
        ),
        _message(["assistant"], {"content": any_of(STRING, _TEXTS, NULL), "tool_calls": _CALLS}, "tool_calls"),
        _message(["tool"], {"content": _CONTENT_WITH_MEDIA, "tool_call_id": STRING}, "content", "tool_call_id"),
    ),
    minItems=1,
)

TOOL_CHOICE: Schema = {
    **any_of(
        {"enum": ["none", "auto", "required", None]},
        open_object({"type": const("function"), "function": _NAMED}, "type", "function"),
    ),
    "default": None,
}
