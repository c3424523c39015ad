"""Fields that OpenAI, vLLM or SGLang know and that cannot be honoured here: refused with the reason, never dropped.

A field at a value that asks for nothing (null, or the default of whoever invented it) is accepted, because clients send
their defaults.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field
from pydantic_core import PydanticCustomError

UNSUPPORTED = "unsupported"
"""The type of the validation error."""


def refused(reason: str, *neutral: Any) -> Any:
    """A field that is refused for a reason unless it is null or one of the neutral values."""
    return Field(None, description=f"Not supported: {reason}.", json_schema_extra={"enum": [None, *neutral]})


def refuse(fields: BaseModel) -> None:
    """Raises a validation error that names the first field which asks for something that cannot be honoured."""
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
