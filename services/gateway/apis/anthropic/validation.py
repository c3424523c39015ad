"""Bodies become requests; what is wrong is said as Anthropic says it: `messages.0.role: …`."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from services.common.errors import SluiceError, invalid
from services.gateway.apis.openai.unsupported_fields import UNSUPPORTED
from services.gateway.apis.openai.validation import MAX_NAME
from services.gateway.http.body_budgets import BodyBudgets

M = TypeVar("M", bound=BaseModel)


def check(kind: type[M], body: dict[str, Any], budgets: BodyBudgets) -> M:
    """The body as a request of this kind; SluiceError(INVALID_ARGUMENT) names the first field that is wrong."""
    try:
        return kind.model_validate(body, context=budgets)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> SluiceError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    parts = [str(part)[:MAX_NAME] for part in first["loc"] if part != "[key]"]
    said = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return _named(parts, "Extra inputs are not permitted")
    if first["type"] == "missing":
        return _named(parts, "Field required")
    if first["type"] == UNSUPPORTED:
        name, _, said = said.partition(" ")
        return _named([*parts, name], said)
    if first["type"] == "value_error" and (not parts or parts == ["thinking"]):
        name, _, said = said.partition(" ")
        return _named([*parts, name], said)
    return _named(parts, said)


def _named(parts: list[str], said: str) -> SluiceError:
    field = ".".join(parts)
    return invalid(f"{field}: {said}.", param=field, code="invalid_value")
