"""Classes of request fields: honoured, without effect here, refused.

A field that would change the answer is rejected with a reason, never silently ignored. A known field whose absence
cannot make an answer wrong, such as a hint, has no effect: it is accepted and reported in `degraded`. Neutral values
(null, or the field's default) are always accepted, because some clients always send them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from typing import Any

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

UNSUPPORTED = "unsupported"
"""The type of the validation error."""

_PLAIN = frozenset((str, int, float, bool, list, dict, type(None)))
"""Types whose values are no models; looking at the type is cheaper than asking the class of all models."""
_NO_EFFECT, _HINT, _PLATFORM = "x-no-effect", "x-hint", "x-platform"


class FieldClass(StrEnum):
    """What a field of a request does here."""

    HONOURED = "honoured"
    HINT = "hint"  # honoured where the model can, otherwise without effect and reported
    NO_EFFECT = "no effect"  # reported
    PLATFORM = "platform"  # for the platform that an API comes from: never an effect on an answer, not reported
    REFUSED = "refused"


def unsupported_field(reason: str, *neutral: Any) -> Any:
    """Returns a field that is rejected with a reason unless it is null or one of the neutral values."""
    return Field(None, description=f"Not supported: {reason}.", json_schema_extra={"enum": [None, *neutral]})


def no_effect_field(reason: str, *neutral: Any) -> Any:
    """Returns a field that is accepted without effect, and reported unless it is null or one of the neutral values."""
    return Field(None, description=f"No effect: {reason}.", json_schema_extra={_NO_EFFECT: [None, *neutral]})


def hint_field(**limits: Any) -> Any:
    """Returns a field that is reported where the model cannot follow it."""
    return Field(None, json_schema_extra={_HINT: True}, **limits)


def platform_field(**limits: Any) -> Any:
    """Returns a field for the platform that an API comes from, which has no effect on an answer anywhere."""
    return Field(None, json_schema_extra={_PLATFORM: True}, **limits)


def class_of(field: FieldInfo) -> FieldClass:
    """Returns the class of a field, as declared."""
    refused, neutral = neutral_values(field)
    if neutral is not None:
        return FieldClass.REFUSED if refused else FieldClass.NO_EFFECT
    extra = field.json_schema_extra
    if not isinstance(extra, dict):
        return FieldClass.HONOURED
    return FieldClass.HINT if _HINT in extra else FieldClass.PLATFORM if _PLATFORM in extra else FieldClass.HONOURED


def neutral_values(field: FieldInfo) -> tuple[bool, list[Any] | None]:
    """Returns whether a field is rejected, and its neutral values; None for a field that has its effect."""
    extra = field.json_schema_extra
    for refused, key in ((True, "enum"), (False, _NO_EFFECT)):
        if isinstance(extra, dict) and isinstance(neutral := extra.get(key), list):
            return refused, list(neutral)
    return False, None


@cache
def _fields_of(model: type[BaseModel]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Returns the neutral values of the fields that are rejected, and of those without effect."""
    rejected: dict[str, list[Any]] = {}
    without_effect: dict[str, list[Any]] = {}
    for name, field in model.model_fields.items():
        refused, neutral = neutral_values(field)
        if neutral is not None:
            (rejected if refused else without_effect)[name] = neutral
    return rejected, without_effect


def fields_without_effect(fields: BaseModel, prefix: str = "") -> list[str]:
    """Returns the paths of the fields that the client has set and that have no effect."""
    _, without_effect = _fields_of(type(fields))
    values = vars(fields)
    found = []
    for name in sorted(fields.model_fields_set):
        value = values.get(name)
        if type(value) not in _PLAIN and isinstance(value, BaseModel):
            found += fields_without_effect(value, f"{prefix}{name}.")
        elif name in without_effect and not _is_neutral(value, without_effect[name]):
            found.append(prefix + name)
    return found


def reject_unsupported(fields: BaseModel) -> None:
    """Raises a validation error for the first unsupported field that is not neutral."""
    rejected, _ = _fields_of(type(fields))
    for name in sorted(rejected.keys() & fields.model_fields_set):
        if not _is_neutral(getattr(fields, name), rejected[name]):
            description = str(type(fields).model_fields[name].description)
            reason = description.removeprefix("Not supported: ").removesuffix(".")
            raise PydanticCustomError(
                UNSUPPORTED, "{field} is not supported: {reason}", {"field": name, "reason": reason}
            )


def _is_neutral(value: Any, neutral: Iterable[Any]) -> bool:
    return any(type(value) is type(accepted) and value == accepted for accepted in neutral)
