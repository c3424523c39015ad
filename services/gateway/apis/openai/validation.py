"""Bodies become requests, and what is wrong with them becomes one sentence that names the field."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from services.common.errors import SluiceError, invalid, shortened
from services.gateway.apis.openai.unsupported_fields import UNSUPPORTED
from services.gateway.http.body_budgets import BodyBudgets

M = TypeVar("M", bound=BaseModel)

MAX_NAME = 64
"""Longest name of a client's field that an error repeats, characters."""


def check(kind: type[M], body: dict[str, Any], budgets: BodyBudgets) -> M:
    """The body as a request of this kind; SluiceError(INVALID_ARGUMENT) names the first field that is wrong."""
    try:
        return kind.model_validate(body, context=budgets)
    except ValidationError as error:
        raise explain(error) from None


def explain(error: ValidationError) -> SluiceError:
    """The first thing wrong, naming its field as `messages[0].role`."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
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
    said = first["msg"].removeprefix("Value error, ")
    if first["type"] == UNSUPPORTED:
        name = said.split(" ", 1)[0]
        param = f"{field}.{name}" if field else name
        return invalid(f"{param}{said.removeprefix(name)}.", param=param, code="unsupported_parameter")
    param = field or said.split(" ", 1)[0]
    sentence = f"Invalid value for {field}: {said[0].lower()}{said[1:]}." if field else f"{said}."
    return invalid(sentence, param=param, code="invalid_value")
