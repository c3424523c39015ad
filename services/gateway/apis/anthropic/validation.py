"""Validates request bodies and formats errors as Anthropic does: `messages.0.role: …`."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from services.common.errors import SluiceError, invalid
from services.gateway.apis.openai.unsupported_fields import UNSUPPORTED
from services.gateway.apis.openai.validation import MAX_NAME
from services.gateway.http.body_budgets import BodyBudgets

M = TypeVar("M", bound=BaseModel)


def check(kind: type[M], body: dict[str, Any], budgets: BodyBudgets) -> M:
    """Returns the validated body; raises SluiceError(INVALID_ARGUMENT) for the first invalid field."""
    try:
        return kind.model_validate(body, context=budgets)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> SluiceError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    parts = [str(part)[:MAX_NAME] for part in first["loc"] if part != "[key]"]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return _error(parts, "Extra inputs are not permitted")
    if first["type"] == "missing":
        return _error(parts, "Field required")
    if first["type"] == UNSUPPORTED or (first["type"] == "value_error" and (not parts or parts == ["thinking"])):
        name, _, message = message.partition(" ")
        return _error([*parts, name], message)
    return _error(parts, message)


def _error(parts: list[str], message: str) -> SluiceError:
    field = ".".join(parts)
    return invalid(f"{field}: {message}.", param=field, code="invalid_value")
