"""Explanations of routing decisions by the router, one per second while a page is open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from services.gateway.core.request import Route, Score

INTERVAL_S = 1.0
MAX_SCORES = 12
"""Ranks of an explained decision, the selected one and the cheapest; the others are left out."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """One decision among `candidates` workers; `scores` has the cheapest first and always includes the selected one."""

    request_id: str
    worker: str
    degraded: str
    candidates: int
    scores: tuple[Score, ...]


class RoutingExplanations:
    """Samples routing decisions.

    Args:
        has_viewers: returns whether a page is open.
        clock: monotonic clock, seconds.
    """

    def __init__(self, has_viewers: Callable[[], bool], clock: Callable[[], float] = monotonic) -> None:
        self._has_viewers = has_viewers
        self._clock = clock
        self._next_at = 0.0
        self.last: Explanation | None = None

    def wanted(self) -> bool:
        """Returns whether to explain the next decision; at most once per second."""
        now = self._clock()
        if now < self._next_at or not self._has_viewers():
            return False
        self._next_at = now + INTERVAL_S
        return True

    def record(self, request_id: str, route: Route) -> None:
        """Sets `last` to an explained decision."""
        scores = sorted(route.scores, key=lambda score: score.cost)
        shown = scores[:MAX_SCORES]
        if not any(score.worker == route.worker_id for score in shown):
            shown[-1:] = [score for score in scores if score.worker == route.worker_id][:1]
        self.last = Explanation(request_id, route.worker_id, route.degraded, len(scores), tuple(shown))
