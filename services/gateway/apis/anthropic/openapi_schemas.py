"""OpenAPI schemas of fields that are validated outside pydantic."""

from __future__ import annotations

from typing import Any

_FLAG = {"type": ["boolean", "null"]}
_NULL = {"type": "null"}
_EMPTY = {"type": ["array", "null"], "maxItems": 0}
_CACHE_CONTROL = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": "ephemeral"}, "ttl": {"enum": ["5m", "1h", None]}},
            "required": ["type"],
            "additionalProperties": False,
        },
        _NULL,
    ]
}
_TEXT = {
    "type": "object",
    "properties": {
        "type": {"const": "text"},
        "text": {"type": "string"},
        "cache_control": _CACHE_CONTROL,
        "citations": _EMPTY,
    },
    "required": ["type", "text"],
    "additionalProperties": False,
}
_THINKING = {
    "type": "object",
    "properties": {"type": {"const": "thinking"}, "thinking": {"type": "string"}, "signature": {"type": "string"}},
    "required": ["type", "thinking", "signature"],
    "additionalProperties": False,
}
_TOOL_USE = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_use"},
        "id": {"type": "string", "minLength": 1},
        "name": {"type": "string", "minLength": 1},
        "input": {"type": "object"},
        "cache_control": _CACHE_CONTROL,
        "caller": {},
        "toolset_name": _NULL,
    },
    "required": ["type", "id", "name", "input"],
    "additionalProperties": False,
}
_TOOL_RESULT = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_result"},
        "tool_use_id": {"type": "string", "minLength": 1},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT}]},
        "is_error": _FLAG,
        "cache_control": _CACHE_CONTROL,
        "toolset_name": _NULL,
    },
    "required": ["type", "tool_use_id"],
    "additionalProperties": False,
}
_NAME = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,128}$"}
_ANY_OF = {"type": {"enum": ["auto", "any"]}, "disable_parallel_tool_use": _FLAG}

SYSTEM: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT}], "default": ""}
MESSAGES: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["user", "assistant", "system"]},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"anyOf": [_TEXT, _THINKING, _TOOL_USE, _TOOL_RESULT]}},
                ]
            },
        },
        "required": ["role", "content"],
        "additionalProperties": False,
    },
}
TOOLS: dict[str, Any] = {
    "type": "array",
    "maxItems": 1024,
    "items": {
        "type": "object",
        "properties": {
            "type": {"enum": ["custom", None]},
            "name": _NAME,
            "description": {"type": ["string", "null"]},
            "input_schema": {"type": "object", "properties": {"type": {"const": "object"}}, "required": ["type"]},
            "cache_control": _CACHE_CONTROL,
            "strict": _FLAG,
            "eager_input_streaming": _FLAG,
            "input_examples": _EMPTY,
            "defer_loading": {"enum": [False, None]},
            "allowed_callers": {"enum": [["direct"], None]},
        },
        "required": ["name", "input_schema"],
        "additionalProperties": False,
    },
}
TOOL_CHOICE: dict[str, Any] = {
    "anyOf": [
        {"type": "object", "properties": _ANY_OF, "required": ["type"], "additionalProperties": False},
        {
            "type": "object",
            "properties": {"type": {"const": "none"}},
            "required": ["type"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"type": {"const": "tool"}, "name": _NAME, "disable_parallel_tool_use": _FLAG},
            "required": ["type", "name"],
            "additionalProperties": False,
        },
    ]
}
