"""OpenAPI schemas of fields that are validated outside pydantic."""

from __future__ import annotations

from services.common.apis.anthropic.tools import HOSTED_TOOL
from services.gateway.apis.json_schemas import (
    ANY,
    BOOLEAN_OR_NULL,
    NON_EMPTY,
    NULL,
    STRING,
    STRING_OR_NULL,
    TOOL_NAME,
    Schema,
    any_of,
    array,
    closed_object,
    const,
    open_object,
)

_EMPTY: Schema = {"type": ["array", "null"], "maxItems": 0}
_CACHE_CONTROL = any_of(
    closed_object({"type": const("ephemeral"), "ttl": {"enum": ["5m", "1h", None]}, "scope": STRING_OR_NULL}, "type"),
    NULL,
)
_TEXT = closed_object(
    {"type": const("text"), "text": STRING, "cache_control": _CACHE_CONTROL, "citations": _EMPTY}, "type", "text"
)
_THINKING = closed_object(
    {"type": const("thinking"), "thinking": STRING, "signature": STRING}, "type", "thinking", "signature"
)
_TOOL_USE = closed_object(
    {
        "type": const("tool_use"),
        "id": NON_EMPTY,
        "name": NON_EMPTY,
        "input": {"type": "object"},
        "cache_control": _CACHE_CONTROL,
        "caller": ANY,
        "toolset_name": NULL,
    },
    *("type", "id", "name", "input"),
)
_TOOL_REFERENCE = closed_object(
    {"type": const("tool_reference"), "tool_name": NON_EMPTY, "cache_control": _CACHE_CONTROL}, "type", "tool_name"
)
_SOURCE = any_of(
    closed_object(
        {
            "type": const("base64"),
            "media_type": {"enum": ["image/jpeg", "image/png", "image/gif", "image/webp"]},
            "data": STRING,
        },
        *("type", "media_type", "data"),
    ),
    closed_object({"type": const("url"), "url": STRING}, "type", "url"),
)
_IMAGE = closed_object({"type": const("image"), "source": _SOURCE, "cache_control": _CACHE_CONTROL}, "type", "source")
_TOOL_RESULT = closed_object(
    {
        "type": const("tool_result"),
        "tool_use_id": NON_EMPTY,
        "content": any_of(STRING, array(any_of(_TEXT, _TOOL_REFERENCE, _IMAGE))),
        "is_error": BOOLEAN_OR_NULL,
        "cache_control": _CACHE_CONTROL,
        "toolset_name": NULL,
    },
    *("type", "tool_use_id"),
)
_REDACTED = open_object({"type": const("redacted_thinking")}, "type")
_BLOCKS = array(any_of(_TEXT, _IMAGE, _THINKING, _REDACTED, _TOOL_USE, _TOOL_RESULT))
_TOOL = closed_object(
    {
        "type": {"enum": ["custom", None]},
        "name": TOOL_NAME,
        "description": STRING_OR_NULL,
        "input_schema": open_object({"type": const("object")}, "type"),
        "cache_control": _CACHE_CONTROL,
        "strict": BOOLEAN_OR_NULL,
        "eager_input_streaming": BOOLEAN_OR_NULL,
        "input_examples": _EMPTY,
        "defer_loading": BOOLEAN_OR_NULL,
        "allowed_callers": {"enum": [["direct"], None]},
    },
    *("name", "input_schema"),
)

SYSTEM: Schema = {**any_of(STRING, array(_TEXT)), "default": ""}
MESSAGES: Schema = array(
    closed_object(
        {"role": {"enum": ["user", "assistant", "system"]}, "content": any_of(STRING, _BLOCKS)}, "role", "content"
    ),
    minItems=1,
)
_HOSTED_TOOL = open_object({"type": {"type": "string", "pattern": f"^{HOSTED_TOOL}$"}}, "type")
TOOLS: Schema = array(any_of(_TOOL, _HOSTED_TOOL), maxItems=1024)
TOOL_CHOICE: Schema = any_of(
    closed_object({"type": {"enum": ["auto", "any"]}, "disable_parallel_tool_use": BOOLEAN_OR_NULL}, "type"),
    closed_object({"type": const("none")}, "type"),
    closed_object(
        {"type": const("tool"), "name": TOOL_NAME, "disable_parallel_tool_use": BOOLEAN_OR_NULL}, "type", "name"
    ),
)
