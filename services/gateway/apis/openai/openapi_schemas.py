"""OpenAPI schemas of fields that are validated outside pydantic, here or by preprocess."""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}
_CALLS = {
    "anyOf": [
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "id": _TEXT_OR_NULL,
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string", "minLength": 1},
                            "arguments": {"type": ["string", "object", "null"]},
                        },
                        "required": ["name"],
                    },
                },
                "required": ["function"],
            },
        },
        {"type": "null"},
    ]
}


def _message(roles: list[str], fields: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"role": {"enum": roles}, "name": _TEXT_OR_NULL, **fields},
        "required": ["role", *required],
    }


MESSAGES: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _message(["user", "system", "developer"], {"content": _CONTENT}, ["content"]),
            _message(
                ["assistant"],
                {"content": _CONTENT, "refusal": _TEXT_OR_NULL, "reasoning_content": _TEXT_OR_NULL},
                ["content"],
            ),
            _message(
                ["assistant"],
                {"content": {"anyOf": [*_CONTENT["anyOf"], {"type": "null"}]}, "tool_calls": _CALLS},
                ["tool_calls"],
            ),
            _message(["tool"], {"content": _CONTENT, "tool_call_id": _TEXT}, ["content", "tool_call_id"]),
        ]
    },
}

TOOL_CHOICE: dict[str, Any] = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string", "minLength": 1}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
    ],
    "default": None,
}
