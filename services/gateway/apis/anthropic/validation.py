"""Formats validation errors as Anthropic does: `messages.0.role: …`."""

from __future__ import annotations

from pydantic_core import ErrorDetails

from services.common.errors import SluiceError, invalid
from services.gateway.apis.openai.unsupported_fields import UNSUPPORTED
from services.gateway.apis.openai.validation import MAX_NAME


def explain(first: ErrorDetails) -> SluiceError:
    """Returns a validation error, with its field as `messages.0.role`."""
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
