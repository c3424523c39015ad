"""Response headers that report fallbacks, migrations and, on request, routing decisions."""

from __future__ import annotations

from collections.abc import Iterable

import orjson
from starlette.responses import Response

from services.common.observability.receipts import RECEIPT
from services.gateway.operations.operation import Marked

DEGRADED = "x-sluice-degraded"
MIGRATIONS = "x-sluice-migrations"
MAX_RECEIPTS = 8
"""Receipts in the header, while each choice has its own in the body; further ones are left out."""


def mark(response: Response, generations: Iterable[Marked]) -> None:
    """Adds headers with the fallbacks used, the number of migrations and receipts, each only if there are any."""
    generations = list(generations)
    reasons = {reason for generation in generations for reason in generation.degraded}
    if reasons:
        response.headers[DEGRADED] = ",".join(sorted(reasons))
    migrations = sum(generation.migrations for generation in generations)
    if migrations:
        response.headers[MIGRATIONS] = str(migrations)
    receipts = [receipt for generation in generations for receipt in generation.receipts]
    if receipts:
        response.headers[RECEIPT] = orjson.dumps(receipts[:MAX_RECEIPTS]).decode()
