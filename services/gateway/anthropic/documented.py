"""JSON schemas of what is read by hand, for the API's documentation."""

from __future__ import annotations

from typing import Any

_TEXT = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_THINKING = {
    "type": "object",
    "properties": {"type": {"const": "thinking"}, "thinking": {"type": "string"}, "signature": {"type": "string"}},
    "required": ["type", "thinking", "signature"],
}
_TOOL_USE = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_use"},
        "id": {"type": "string", "minLength": 1},
        "name": {"type": "string", "minLength": 1},
        "input": {"type": "object"},
    },
    "required": ["type", "id", "name", "input"],
}
_TOOL_RESULT = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_result"},
        "tool_use_id": {"type": "string", "minLength": 1},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT}]},
        "is_error": {"type": "boolean"},
    },
    "required": ["type", "tool_use_id"],
}
_NAME = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,128}$"}
_ANY_OF = {"type": {"enum": ["auto", "any", "none"]}, "disable_parallel_tool_use": {"type": ["boolean", "null"]}}

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
        },
        "required": ["name", "input_schema"],
    },
}
TOOL_CHOICE: dict[str, Any] = {
    "anyOf": [
        {"type": "object", "properties": _ANY_OF, "required": ["type"]},
        {
            "type": "object",
            "properties": {"type": {"const": "tool"}, "name": _NAME},
            "required": ["type", "name"],
        },
    ]
}
