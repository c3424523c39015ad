"""Reads the parts of tool definitions that the Messages and Responses APIs share."""

from __future__ import annotations

import re
from typing import Any

from services.common.apis.field_reader import FieldReader

TOOL_NAME_PATTERN = "[a-zA-Z0-9_-]{1,128}"
TOOL_NAME_RULE = "must be 1 to 128 letters, digits, underscores and dashes"


def check_loading(reader: FieldReader) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) unless the tool is one that the model itself may call."""
    reader.under("defer_loading").optional(bool)
    reader.under("allowed_callers").reject_unless(["direct"], reason="tools cannot be called by code")


def read_definition(reader: FieldReader, *own_fields: str) -> dict[str, Any]:
    """Returns name and description of a tool as those of a function.

    Args:
        own_fields: the fields that only the client's API has.

    Raises:
        SluiceError: INVALID_ARGUMENT for an unknown, invalid or unsupported field.
    """
    reader.fields("type", "name", "description", "strict", "defer_loading", "allowed_callers", *own_fields)
    check_loading(reader)
    reader.under("strict").optional(bool)
    name = reader.under("name")
    if not re.fullmatch(TOOL_NAME_PATTERN, name.text()):
        raise name.invalid(TOOL_NAME_RULE)
    description = reader.under("description").optional(str)
    return {"name": name.value} if description is None else {"name": name.value, "description": description}
