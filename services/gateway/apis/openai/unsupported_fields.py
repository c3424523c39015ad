"""Fields of OpenAI, vLLM or SGLang that are not supported: rejected with a reason, never silently ignored.

Neutral values (null, or the field's default) are accepted, because some clients always send them.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field
from pydantic_core import PydanticCustomError

UNSUPPORTED = "unsupported"
"""The type of the validation error."""


def unsupported_field(reason: str, *neutral: Any) -> Any:
    """Returns a field that is rejected with a reason unless it is null or one of the neutral values."""
    return Field(None, description=f"Not supported: {reason}.", json_schema_extra={"enum": [None, *neutral]})


def reject_unsupported(fields: BaseModel) -> None:
    """Raises a validation error for the first unsupported field that is not neutral."""
    kind = type(fields)
    for name in sorted(fields.model_fields_set):
        field = kind.model_fields[name]
        extra = field.json_schema_extra
        if not isinstance(extra, dict) or "enum" not in extra:
            continue
        value, neutral = getattr(fields, name), extra["enum"]
        assert isinstance(neutral, list)
        if not any(type(value) is type(accepted) and value == accepted for accepted in neutral):
            reason = str(field.description).removeprefix("Not supported: ").removesuffix(".")
            raise PydanticCustomError(
                UNSUPPORTED, "{field} is not supported: {reason}", {"field": name, "reason": reason}
            )
