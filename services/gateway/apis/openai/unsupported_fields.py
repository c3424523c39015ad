"""Fields of other APIs and servers that do nothing here.

A field that would change the answer is rejected with a reason, never silently ignored. A known field whose absence
cannot make an answer wrong, such as a hint, has no effect: it is accepted and reported in `degraded`. Neutral values
(null, or the field's default) are always accepted, because some clients always send them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

UNSUPPORTED = "unsupported"
"""The type of the validation error."""

_NO_EFFECT = "x-no-effect"

PLATFORM_FIELDS = frozenset(
    (
        "client_metadata",
        "max_tool_calls",
        "metadata",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
    )
)
"""Fields for the platform that an API comes from, which have no effect on an answer anywhere and are not reported."""


def unsupported_field(reason: str, *neutral: Any) -> Any:
    """Returns a field that is rejected with a reason unless it is null or one of the neutral values."""
    return Field(None, description=f"Not supported: {reason}.", json_schema_extra={"enum": [None, *neutral]})


def no_effect_field(reason: str, *neutral: Any) -> Any:
    """Returns a field that is accepted without effect, and reported unless it is null or one of the neutral values."""
    return Field(None, description=f"No effect: {reason}.", json_schema_extra={_NO_EFFECT: [None, *neutral]})


def neutral_values(field: FieldInfo) -> tuple[bool, list[Any] | None]:
    """Returns whether a field is rejected, and its neutral values; None for a field that has its effect."""
    extra = field.json_schema_extra
    for refused, key in ((True, "enum"), (False, _NO_EFFECT)):
        if isinstance(extra, dict) and isinstance(neutral := extra.get(key), list):
            return refused, list(neutral)
    return False, None


def fields_without_effect(fields: BaseModel, prefix: str = "") -> list[str]:
    """Returns the paths of the fields that the client has set and that have no effect."""
    found = []
    for name in sorted(fields.model_fields_set):
        field, value = type(fields).model_fields.get(name), getattr(fields, name, None)
        if isinstance(value, BaseModel):
            found += fields_without_effect(value, f"{prefix}{name}.")
        elif field is not None:
            refused, neutral = neutral_values(field)
            if neutral is not None and not refused and not _is_neutral(value, neutral):
                found.append(prefix + name)
    return found


def reject_unsupported(fields: BaseModel) -> None:
    """Raises a validation error for the first unsupported field that is not neutral."""
    for name in sorted(fields.model_fields_set):
        field = type(fields).model_fields[name]
        refused, neutral = neutral_values(field)
        if refused and neutral is not None and not _is_neutral(getattr(fields, name), neutral):
            reason = str(field.description).removeprefix("Not supported: ").removesuffix(".")
            raise PydanticCustomError(
                UNSUPPORTED, "{field} is not supported: {reason}", {"field": name, "reason": reason}
            )


def _is_neutral(value: Any, neutral: Iterable[Any]) -> bool:
    return any(type(value) is type(accepted) and value == accepted for accepted in neutral)
