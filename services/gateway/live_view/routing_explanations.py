"""Why requests went where they went: the router's own reasons, for one decision a second while a viewer is connected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from services.gateway.core.request import Route, Score

EVERY_S = 1.0
MOST_SCORES = 12


@dataclass(frozen=True, slots=True)
class Explanation:
    """One decision among `candidates` workers; `scores` has the cheapest of them first, and the chosen one always."""

    request_id: str
    worker: str
    degraded: str
    candidates: int
    scores: tuple[Score, ...]


class RoutingExplanations:
    """Samples decisions.

    Args:
        looked_at: whether anybody would see an explanation.
        clock: seconds, for tests.
    """

    def __init__(self, looked_at: Callable[[], bool], clock: Callable[[], float] = monotonic) -> None:
        self._looked_at = looked_at
        self._clock = clock
        self._next_at = 0.0
        self.last: Explanation | None = None

    def wanted(self) -> bool:
        """Whether the next decision should be explained; True makes it wait a second before it is True again."""
        now = self._clock()
        if now < self._next_at or not self._looked_at():
            return False
        self._next_at = now + EVERY_S
        return True

    def keep(self, request_id: str, route: Route) -> None:
        """An explained decision was made."""
        scores = sorted(route.scores, key=lambda score: score.cost)
        shown = scores[:MOST_SCORES]
        if not any(score.worker == route.worker_id for score in shown):
            shown[-1:] = [score for score in scores if score.worker == route.worker_id][:1]
        self.last = Explanation(request_id, route.worker_id, route.degraded, len(scores), tuple(shown))
