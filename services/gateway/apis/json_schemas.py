"""Parts of OpenAPI schemas."""

from __future__ import annotations

from typing import Any

from services.common.apis.tool_definitions import TOOL_NAME_PATTERN

Schema = dict[str, Any]

ANY: Schema = {}
STRING: Schema = {"type": "string"}
NON_EMPTY: Schema = {"type": "string", "minLength": 1}
NULL: Schema = {"type": "null"}
STRING_OR_NULL: Schema = {"type": ["string", "null"]}
BOOLEAN_OR_NULL: Schema = {"type": ["boolean", "null"]}
FALSE_OR_NULL: Schema = {"enum": [False, None]}

TOOL_NAME: Schema = {"type": "string", "pattern": f"^{TOOL_NAME_PATTERN}$"}


def const(value: str) -> Schema:
    """Returns the schema of one string."""
    return {"const": value}


def any_of(*schemas: Schema) -> Schema:
    """Returns the schema of values that match one of these schemas."""
    return {"anyOf": list(schemas)}


def array(items: Schema, **limits: int) -> Schema:
    """Returns the schema of a list."""
    return {"type": "array", **limits, "items": items}


def open_object(properties: dict[str, Schema], *required: str) -> Schema:
    """Returns the schema of an object that may have further properties."""
    return {"type": "object", "properties": properties, "required": list(required)}


def closed_object(properties: dict[str, Schema], *required: str) -> Schema:
    """Returns the schema of an object without further properties."""
    return {**open_object(properties, *required), "additionalProperties": False}
