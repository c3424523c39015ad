"""OpenAPI schemas of fields that are validated outside pydantic."""

from __future__ import annotations

from services.common.apis.responses.tools import HOSTED_TOOL
from services.gateway.apis.json_schemas import (
    ANY,
    BOOLEAN_OR_NULL,
    FALSE_OR_NULL,
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

MAX_TOOLS = 1024
"""Tools of a request of the Responses API; more are refused with INVALID_ARGUMENT."""


def _item(properties: dict[str, Schema], *required: str) -> Schema:
    common = {"id": STRING_OR_NULL, "status": {"enum": ["in_progress", "completed", "incomplete", None]}}
    return closed_object({**common, **properties}, *required)


def _parts(kind: str) -> Schema:
    return any_of(array(closed_object({"type": const(kind), "text": STRING}, "type", "text")), NULL)


_TEXT_PART = closed_object(
    {
        "type": {"enum": ["input_text", "output_text"]},
        "text": STRING,
        **dict.fromkeys(("annotations", "logprobs", "parsed", "prompt_cache_breakpoint"), ANY),
    },
    *("type", "text"),
)
_IMAGE_PART = closed_object(
    {
        "type": const("input_image"),
        "image_url": NON_EMPTY,
        "detail": {"enum": ["auto", "low", "high", None]},
        "file_id": NULL,
        "prompt_cache_breakpoint": ANY,
    },
    *("type", "image_url"),
)
_AUDIO_PART = closed_object(
    {
        "type": const("input_audio"),
        "input_audio": closed_object({"data": NON_EMPTY, "format": NON_EMPTY}, "data", "format"),
    },
    *("type", "input_audio"),
)
_PART = any_of(_TEXT_PART, _IMAGE_PART, _AUDIO_PART)
_MESSAGE = _item(
    {
        "phase": ANY,
        "type": const("message"),
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": any_of(STRING, array(_PART, minItems=1)),
    },
    *("role", "content"),
)
_CALL = _item(
    {
        "parsed_arguments": ANY,
        "caller": ANY,
        "namespace": STRING_OR_NULL,
        "async": FALSE_OR_NULL,
        "type": const("function_call"),
        "call_id": NON_EMPTY,
        "name": NON_EMPTY,
        "arguments": STRING,
    },
    *("type", "call_id", "name", "arguments"),
)
_CUSTOM_CALL = _item(
    {
        "caller": ANY,
        "namespace": STRING_OR_NULL,
        "type": const("custom_tool_call"),
        "call_id": NON_EMPTY,
        "name": NON_EMPTY,
        "input": STRING,
    },
    *("type", "call_id", "name", "input"),
)
_CALL_OUTPUT = _item(
    {
        **dict.fromkeys(("name", "caller", "namespace"), ANY),
        "type": {"enum": ["function_call_output", "custom_tool_call_output"]},
        "call_id": NON_EMPTY,
        "output": any_of(STRING, array(_PART)),
    },
    *("type", "call_id", "output"),
)
_REASONING = _item(
    {
        "type": const("reasoning"),
        "summary": _parts("summary_text"),
        "content": _parts("reasoning_text"),
        "encrypted_content": STRING_OR_NULL,
    },
    "type",
)
_COMPACTION = _item(
    {"type": const("compaction"), "encrypted_content": NON_EMPTY, "created_by": ANY}, "type", "encrypted_content"
)
_REFERENCE = closed_object({"type": const("item_reference"), "id": NON_EMPTY}, "type", "id")
_TOOL = closed_object(
    {
        "type": const("function"),
        "name": TOOL_NAME,
        "description": STRING_OR_NULL,
        "parameters": {"type": ["object", "null"]},
        "strict": BOOLEAN_OR_NULL,
        "defer_loading": BOOLEAN_OR_NULL,
        "allowed_callers": {"enum": [["direct"], None]},
        "output_schema": NULL,
        "async": FALSE_OR_NULL,
    },
    *("type", "name"),
)

_CUSTOM_TOOL = closed_object(
    {
        "type": const("custom"),
        "name": TOOL_NAME,
        "description": STRING_OR_NULL,
        "format": any_of(
            closed_object({"type": const("text")}, "type"),
            closed_object(
                {"type": const("grammar"), "syntax": {"enum": ["lark", "regex"]}, "definition": STRING},
                *("type", "syntax", "definition"),
            ),
            NULL,
        ),
        "defer_loading": BOOLEAN_OR_NULL,
        "allowed_callers": {"enum": [["direct"], None]},
    },
    *("type", "name"),
)
_NAMESPACE = closed_object(
    {
        "type": const("namespace"),
        "name": TOOL_NAME,
        "description": STRING_OR_NULL,
        "tools": array(any_of(_TOOL, _CUSTOM_TOOL)),
    },
    *("type", "name", "tools"),
)
_HOSTED_TOOL = open_object({"type": {"type": "string", "pattern": HOSTED_TOOL}}, "type")

_CONVERSATION_ID = {"type": "string", "minLength": 1, "maxLength": 128}
CONVERSATION: Schema = any_of(_CONVERSATION_ID, closed_object({"id": _CONVERSATION_ID}, "id"), NULL)
ITEM: Schema = any_of(_MESSAGE, _CALL, _CUSTOM_CALL, _CALL_OUTPUT, _REASONING, _COMPACTION, _REFERENCE)
INPUT: Schema = any_of(NON_EMPTY, array(ITEM, minItems=1))
TOOLS: Schema = any_of(array(any_of(_TOOL, _CUSTOM_TOOL, _NAMESPACE, _HOSTED_TOOL), maxItems=MAX_TOOLS), NULL)
TOOL_CHOICE: Schema = any_of(
    {"enum": ["none", "auto", "required", None]},
    open_object({"type": {"enum": ["function", "custom"]}, "name": TOOL_NAME}, "type", "name"),
)
