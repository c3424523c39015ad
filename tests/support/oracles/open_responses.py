"""The schema of Open Responses (version 2026-04-24): what its response objects, items and events must have.

Objects may have further fields. Two kinds of events and items are OpenAI's own and follow its client library:
`response.reasoning_text`, which Open Responses calls `response.reasoning`, and calls of custom tools.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
STRING_OR_NULL: Schema = {"type": ["string", "null"]}
INTEGER_OR_NULL: Schema = {"type": ["integer", "null"]}
OBJECT_OR_NULL: Schema = {"type": ["object", "null"]}


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    return {"type": "object", "required": [*required], "properties": {**required, **(optional or {})}}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _by_type(*kinds: Schema) -> Schema:
    """One of several objects, whose `type` selects which, so that an error names the field that is wrong."""
    names = [name for kind in kinds for name in kind["properties"]["type"]["enum"]]
    cases: list[Schema] = [
        {"if": {"required": ["type"], "properties": {"type": kind["properties"]["type"]}}, "then": kind}
        for kind in kinds
    ]
    return {"type": "object", "required": ["type"], "properties": {"type": {"enum": names}}, "allOf": cases}


def _kind(*names: str) -> Schema:
    return {"enum": list(names)}


_STATUS = _kind("in_progress", "completed", "incomplete")
_TOP = _object({"token": STRING, "logprob": NUMBER, "bytes": _list(INTEGER)})
_LOGPROBS = _list(_object({**_TOP["properties"], "top_logprobs": _list(_TOP)}))
_TEXT_PARTS = [_object({"type": _kind(name), "text": STRING}) for name in ("input_text", "text", "summary_text")]
_REASONING_PART = _object({"type": _kind("reasoning_text"), "text": STRING})
_OUTPUT_PART = _object(
    {"type": _kind("output_text"), "text": STRING, "annotations": _list({})}, {"logprobs": _LOGPROBS}
)
_REFUSAL = _object({"type": _kind("refusal"), "refusal": STRING})
PART = _by_type(*_TEXT_PARTS, _REASONING_PART, _OUTPUT_PART, _REFUSAL)

_IDENTIFIED = {"id": STRING, "status": _STATUS}
_CALLED = {"call_id": STRING, **_IDENTIFIED}
_OUTPUT = {"anyOf": [STRING, _list(PART)]}
ITEM = _by_type(
    _object(
        {
            "type": _kind("message"),
            **_IDENTIFIED,
            "role": _kind("user", "assistant", "system", "developer"),
            "content": _list(PART),
        },
        {"phase": _kind("commentary", "final_answer")},
    ),
    _object({"type": _kind("function_call"), **_CALLED, "name": STRING, "arguments": STRING}),
    _object({"type": _kind("custom_tool_call"), **_CALLED, "name": STRING, "input": STRING}),
    _object({"type": _kind("function_call_output", "custom_tool_call_output"), **_CALLED, "output": _OUTPUT}),
    _object(
        {"type": _kind("reasoning"), "id": STRING, "summary": _list(PART)},
        {"content": _list(PART), "encrypted_content": STRING},
    ),
    _object({"type": _kind("compaction"), "id": STRING, "encrypted_content": STRING}, {"created_by": STRING}),
)

USAGE = _object(
    {
        **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), INTEGER),
        "input_tokens_details": _object({"cached_tokens": INTEGER}),
        "output_tokens_details": _object({"reasoning_tokens": INTEGER}),
    }
)
_FORMAT = _by_type(
    _object({"type": _kind("text", "json_object")}),
    _object(
        {
            "type": _kind("json_schema"),
            "name": STRING,
            "description": STRING_OR_NULL,
            "schema": OBJECT_OR_NULL,
            "strict": BOOLEAN,
        }
    ),
)
_FUNCTION = _object(
    {
        "type": STRING,
        "name": STRING,
        "description": STRING_OR_NULL,
        "parameters": OBJECT_OR_NULL,
        "strict": _nullable(BOOLEAN),
    }
)
_TOOL = {"if": _object({"type": _kind("function")}), "then": _FUNCTION, "else": _object({"type": STRING})}
_CHOICE = {"anyOf": [_kind("none", "auto", "required"), _object({"type": STRING})]}
RESPONSE = _object(
    {
        "id": STRING,
        "object": _kind("response"),
        "created_at": INTEGER,
        "completed_at": INTEGER_OR_NULL,
        "status": _kind("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
        "incomplete_details": _nullable(_object({"reason": STRING})),
        "model": STRING,
        "previous_response_id": STRING_OR_NULL,
        "instructions": STRING_OR_NULL,
        "output": _list(ITEM),
        "error": _nullable(_object({"code": STRING, "message": STRING})),
        "tools": _list(_TOOL),
        "tool_choice": _CHOICE,
        "truncation": _kind("auto", "disabled"),
        "parallel_tool_calls": BOOLEAN,
        "text": _object({"format": _FORMAT}, {"verbosity": _kind("low", "medium", "high")}),
        **dict.fromkeys(("top_p", "temperature", "presence_penalty", "frequency_penalty"), NUMBER),
        "top_logprobs": INTEGER,
        "reasoning": _nullable(_object({"effort": STRING_OR_NULL, "summary": STRING_OR_NULL})),
        "usage": _nullable(USAGE),
        **dict.fromkeys(("max_output_tokens", "max_tool_calls"), INTEGER_OR_NULL),
        "store": BOOLEAN,
        "background": BOOLEAN,
        "service_tier": STRING,
        "metadata": {},
        **dict.fromkeys(("safety_identifier", "prompt_cache_key"), STRING_OR_NULL),
    }
)
COMPACTED = _object(
    {
        "id": STRING,
        "object": _kind("response.compaction"),
        "output": _list(ITEM),
        "created_at": INTEGER,
        "usage": USAGE,
    }
)


def _event(*names: str, **fields: Schema) -> Schema:
    kinds = _kind(*(f"response.{name}" for name in names))
    return _object({"type": kinds, "sequence_number": INTEGER, **fields})


_PLACE = {"item_id": STRING, "output_index": INTEGER}
_IN_CONTENT = {**_PLACE, "content_index": INTEGER}
_IN_SUMMARY = {**_PLACE, "summary_index": INTEGER}
_ERROR = _object({"code": STRING, "message": STRING}, {"type": STRING, "param": STRING_OR_NULL})
EVENT = _by_type(
    _event("created", "queued", "in_progress", "completed", "failed", "incomplete", response=RESPONSE),
    _event("output_item.added", "output_item.done", output_index=INTEGER, item=_nullable(ITEM)),
    _event("content_part.added", "content_part.done", **_IN_CONTENT, part=PART),
    _event("reasoning_summary_part.added", "reasoning_summary_part.done", **_IN_SUMMARY, part=PART),
    _event("output_text.delta", "reasoning_text.delta", **_IN_CONTENT, delta=STRING),
    _event("output_text.done", "reasoning_text.done", **_IN_CONTENT, text=STRING),
    _event("reasoning_summary_text.delta", **_IN_SUMMARY, delta=STRING),
    _event("reasoning_summary_text.done", **_IN_SUMMARY, text=STRING),
    _event("function_call_arguments.delta", "custom_tool_call_input.delta", **_PLACE, delta=STRING),
    _event("function_call_arguments.done", **_PLACE, arguments=STRING),
    _event("custom_tool_call_input.done", **_PLACE, input=STRING),
    _object({"type": _kind("error"), "error": _ERROR}, {"status": INTEGER}),
)
FINAL = ("response.completed", "response.failed", "response.incomplete")


def problems(value: Any, schema: Schema) -> list[str]:
    """Returns what is wrong with a value, each with its path."""
    errors = Draft202012Validator(schema).iter_errors(value)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in errors]


def event_problems(events: Iterable[dict[str, Any]]) -> list[str]:
    """Returns what is wrong with the events of one response: their schema, their numbers, their beginning and end."""
    seen = list(events)
    found = [f"{event.get('type')}: {problem}" for event in seen for problem in problems(event, EVENT)]
    if [event.get("sequence_number") for event in seen] != list(range(len(seen))):
        found.append("the sequence numbers do not count from 0")
    kinds = [event["type"] for event in seen]
    if kinds[:1] != ["response.created"] or kinds[-1] not in FINAL:
        found.append(f"the events begin with {kinds[:1]} and end with {kinds[-1:]}")
    return found
