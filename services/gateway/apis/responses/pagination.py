"""Pages of items, as OpenAI's lists have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.errors import invalid

LIMIT, MOST = 20, 100


def page(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """One page of items, newest first unless `order` says otherwise; SluiceError(INVALID_ARGUMENT) names the field."""
    limit, order, after = query.get("limit", str(LIMIT)), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MOST):
        raise invalid(f"limit must be a number from 1 to {MOST}.", param="limit", code="invalid_value")
    if order not in ("asc", "desc"):
        raise invalid("order must be asc or desc.", param="order", code="invalid_value")
    ordered = items if order == "asc" else items[::-1]
    first = 0
    if after is not None:
        places = [index for index, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise invalid(f"after names {after[:80]!r}, which is no item here.", param="after", code="invalid_value")
        first = places[-1] + 1
    shown = ordered[first : first + int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": first + len(shown) < len(ordered),
    }
