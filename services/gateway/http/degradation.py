"""Headers that say what happened to a request on its way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from starlette.responses import Response

DEGRADED = "x-sluice-degraded"
MIGRATIONS = "x-sluice-migrations"


class Marked(Protocol):
    """What took fallbacks and moved between workers."""

    @property
    def degraded(self) -> set[str]: ...

    @property
    def migrations(self) -> int: ...


def mark(response: Response, generations: Iterable[Marked]) -> None:
    """Says in headers which fallbacks were taken and how often another worker took over; nothing when nothing was."""
    generations = list(generations)
    reasons = {reason for generation in generations for reason in generation.degraded}
    if reasons:
        response.headers[DEGRADED] = ",".join(sorted(reasons))
    migrations = sum(generation.migrations for generation in generations)
    if migrations:
        response.headers[MIGRATIONS] = str(migrations)
