"""Validates request bodies and formats validation errors as one sentence that names the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from services.common.base.errors import SluiceError, invalid, shortened
from services.gateway.apis.openai.unsupported_fields import UNSUPPORTED
from services.gateway.http.body_budgets import BodyBudgets

M = TypeVar("M", bound=BaseModel)

MAX_NAME = 64
"""Characters of a client's field name that an error repeats; the rest is left out."""


def explain(first: ErrorDetails) -> SluiceError:
    """Returns a validation error, with its field as `messages[0].role`."""
    field = ""
    for part in first["loc"]:
        if part == "[key]":
            break
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    field = shortened(field)
    if first["type"] == "extra_forbidden":
        return invalid(f"Unrecognized request argument supplied: {field}.", param=field, code="unknown_parameter")
    if first["type"] == "missing":
        return invalid(f"Missing required parameter: {field}.", param=field, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == UNSUPPORTED:
        name = message.split(" ", 1)[0]
        param = f"{field}.{name}" if field else name
        return invalid(f"{param}{message.removeprefix(name)}.", param=param, code="unsupported_parameter")
    param = field or message.split(" ", 1)[0]
    sentence = f"Invalid value for {field}: {message[0].lower()}{message[1:]}." if field else f"{message}."
    return invalid(sentence, param=param, code="invalid_value")


def check(
    kind: type[M], body: dict[str, Any], budgets: BodyBudgets, explain: Callable[[ErrorDetails], SluiceError] = explain
) -> M:
    """Returns the validated body.

    Args:
        explain: formats a validation error as the client's API does.

    Raises:
        SluiceError: INVALID_ARGUMENT for the first invalid field.
    """
    try:
        return kind.model_validate(body, context=budgets)
    except ValidationError as error:
        raise explain(error.errors(include_url=False, include_input=False, include_context=False)[0]) from None
