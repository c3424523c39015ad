"""Response headers that report fallbacks and migrations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from starlette.responses import Response

DEGRADED = "x-sluice-degraded"
MIGRATIONS = "x-sluice-migrations"


class Marked(Protocol):
    """A generation that may have used fallbacks or moved between workers."""

    @property
    def degraded(self) -> set[str]: ...

    @property
    def migrations(self) -> int: ...


def mark(response: Response, generations: Iterable[Marked]) -> None:
    """Adds headers with the fallbacks used and the number of migrations, each only if there are any."""
    generations = list(generations)
    reasons = {reason for generation in generations for reason in generation.degraded}
    if reasons:
        response.headers[DEGRADED] = ",".join(sorted(reasons))
    migrations = sum(generation.migrations for generation in generations)
    if migrations:
        response.headers[MIGRATIONS] = str(migrations)
