"""OpenAPI schemas of fields that are validated outside pydantic."""

from __future__ import annotations

from typing import Any

MAX_TOOLS = 1024

_TEXT_PART = {
    "type": "object",
    "properties": {
        "type": {"enum": ["input_text", "output_text"]},
        "text": {"type": "string"},
        "annotations": {},
        "logprobs": {},
        "parsed": {},
        "prompt_cache_breakpoint": {},
    },
    "required": ["type", "text"],
    "additionalProperties": False,
}
_ITEM_FIELDS = {
    "id": {"type": ["string", "null"]},
    "status": {"enum": ["in_progress", "completed", "incomplete", None]},
}
_MESSAGE = {
    "type": "object",
    "properties": {
        **_ITEM_FIELDS,
        "phase": {},
        "type": {"const": "message"},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT_PART}]},
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}
_CALL = {
    "type": "object",
    "properties": {
        **_ITEM_FIELDS,
        "parsed_arguments": {},
        "caller": {},
        "namespace": {"type": "null"},
        "async": {"enum": [False, None]},
        "type": {"const": "function_call"},
        "call_id": {"type": "string", "minLength": 1},
        "name": {"type": "string", "minLength": 1},
        "arguments": {"type": "string"},
    },
    "required": ["type", "call_id", "name", "arguments"],
    "additionalProperties": False,
}
_CALL_OUTPUT = {
    "type": "object",
    "properties": {
        **_ITEM_FIELDS,
        "name": {},
        "caller": {},
        "namespace": {},
        "type": {"const": "function_call_output"},
        "call_id": {"type": "string", "minLength": 1},
        "output": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
    },
    "required": ["type", "call_id", "output"],
    "additionalProperties": False,
}


def _parts(kind: str) -> dict[str, Any]:
    part = {
        "type": "object",
        "properties": {"type": {"const": kind}, "text": {"type": "string"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    }
    return {"anyOf": [{"type": "array", "items": part}, {"type": "null"}]}


_REASONING = {
    "type": "object",
    "properties": {
        **_ITEM_FIELDS,
        "type": {"const": "reasoning"},
        "summary": _parts("summary_text"),
        "content": _parts("reasoning_text"),
        "encrypted_content": {"type": ["string", "null"]},
    },
    "required": ["type"],
    "additionalProperties": False,
}
INPUT: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "minItems": 1,
            "items": {"anyOf": [_MESSAGE, _CALL, _CALL_OUTPUT, _REASONING]},
        },
    ]
}
_NAME = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,128}$"}
TOOLS: dict[str, Any] = {
    "anyOf": [
        {
            "type": "array",
            "maxItems": MAX_TOOLS,
            "items": {
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "name": _NAME,
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"]},
                    "strict": {"type": ["boolean", "null"]},
                    "defer_loading": {"enum": [False, None]},
                    "allowed_callers": {"enum": [["direct"], None]},
                    "output_schema": {"type": "null"},
                    "async": {"enum": [False, None]},
                },
                "required": ["type", "name"],
                "additionalProperties": False,
            },
        },
        {"type": "null"},
    ]
}
TOOL_CHOICE: dict[str, Any] = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": _NAME},
            "required": ["type", "name"],
        },
    ]
}
