"""Fields of other APIs and servers that do nothing here.

A field that would change the answer is rejected with a reason, never silently ignored. A known field whose absence
cannot make an answer wrong, such as a hint, has no effect: it is accepted and reported in `degraded`. Neutral values
(null, or the field's default) are always accepted, because some clients always send them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field
from pydantic_core import PydanticCustomError

UNSUPPORTED = "unsupported"
"""The type of the validation error."""

_NO_EFFECT = "x-no-effect"


def unsupported_field(reason: str, *neutral: Any) -> Any:
    """Returns a field that is rejected with a reason unless it is null or one of the neutral values."""
    return Field(None, description=f"Not supported: {reason}.", json_schema_extra={"enum": [None, *neutral]})


def no_effect_field(reason: str, *neutral: Any) -> Any:
    """Returns a field that is accepted without effect, and reported unless it is null or one of the neutral values."""
    return Field(None, description=f"No effect: {reason}.", json_schema_extra={_NO_EFFECT: [None, *neutral]})


def fields_without_effect(fields: BaseModel, prefix: str = "") -> list[str]:
    """Returns the paths of the fields that the client has set and that have no effect."""
    found = []
    for name in sorted(fields.model_fields_set):
        field = type(fields).model_fields.get(name)
        if field is None:
            continue
        value, extra = getattr(fields, name), field.json_schema_extra
        if isinstance(extra, dict) and _NO_EFFECT in extra:
            neutral = extra[_NO_EFFECT]
            assert isinstance(neutral, list)
            if not _is_neutral(value, neutral):
                found.append(prefix + name)
        elif isinstance(value, BaseModel):
            found += fields_without_effect(value, f"{prefix}{name}.")
    return found


def _is_neutral(value: Any, neutral: Iterable[Any]) -> bool:
    return any(type(value) is type(accepted) and value == accepted for accepted in neutral)


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
        if not _is_neutral(value, neutral):
            reason = str(field.description).removeprefix("Not supported: ").removesuffix(".")
            raise PydanticCustomError(
                UNSUPPORTED, "{field} is not supported: {reason}", {"field": name, "reason": reason}
            )
