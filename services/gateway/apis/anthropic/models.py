"""The model list in the format of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from services.common.base.errors import invalid
from services.gateway.http.json_transport import read_limit

MAX_LIMIT = 1000
"""Models of one page; a larger `limit` is refused with INVALID_ARGUMENT."""


def as_anthropic(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model object, converted from OpenAI's format."""
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.get("max_model_len") or None,
        "max_tokens": model.get("max_model_len") or None,
    }


def page(models: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Returns a page of models; raises SluiceError(INVALID_ARGUMENT) for an invalid parameter."""
    limit = read_limit(query, MAX_LIMIT)
    if limit is None:
        raise invalid(f"limit: must be a number from 1 to {MAX_LIMIT}.", param="limit")
    ids = [model["id"] for model in models]
    first, end = 0, len(ids)
    if (after := query.get("after_id")) is not None:
        first = _index(ids, after, "after_id") + 1
    if (before := query.get("before_id")) is not None:
        end = _index(ids, before, "before_id")
    backwards = before is not None and after is None
    shown = models[max(first, end - limit) : end] if backwards else models[first : min(end, first + limit)]
    return {
        "data": [as_anthropic(model) for model in shown],
        "has_more": len(shown) < end - first,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }


def _index(ids: list[str], wanted: str, field: str) -> int:
    if wanted not in ids:
        raise invalid(f"{field}: names {wanted[:80]!r}, which is not a served model.", param=field)
    return ids.index(wanted)
