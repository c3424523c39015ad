"""Pages of items in the format of OpenAI's lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.base.errors import invalid
from services.gateway.http.json_transport import read_limit

MAX_LIMIT = 100
"""Items of one page; a larger `limit` is refused with INVALID_ARGUMENT."""


def page(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Returns a page of items, newest first by default; raises SluiceError(INVALID_ARGUMENT) for invalid parameters."""
    limit, order, after = read_limit(query, MAX_LIMIT), query.get("order", "desc"), query.get("after")
    if limit is None:
        raise invalid(f"limit must be a number from 1 to {MAX_LIMIT}.", param="limit", code="invalid_value")
    if order not in ("asc", "desc"):
        raise invalid("order must be asc or desc.", param="order", code="invalid_value")
    ordered = items if order == "asc" else items[::-1]
    first = 0
    if after is not None:
        indexes = [index for index, item in enumerate(ordered) if item["id"] == after]
        if not indexes:
            raise invalid(
                f"after names {after[:80]!r}, which is not an item of this response.",
                param="after",
                code="invalid_value",
            )
        first = indexes[-1] + 1
    shown = ordered[first : first + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": first + len(shown) < len(ordered),
    }
