"""Decision records: predicted, best possible and delivered cached tokens of routed requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from services.router.workers.worker import WorkerRank


@dataclass(slots=True)
class Decision:
    """Record of a query with a reservation. Lengths are tokens; `delivered_cached_tokens` is None until reported."""

    reservation_id: str
    request_id: str
    model: str
    slot: WorkerRank
    address: str
    prompt_tokens: int
    predicted_cached_tokens: int
    best_cached_tokens: int
    decided_unix_ms: int
    decision_us: int
    policy: str
    degraded: str = ""
    waited_ms: int = 0
    session_hit: bool = False
    prefill_slot: WorkerRank | None = None
    prefill_address: str = ""
    delivered_cached_tokens: int | None = None
    output_tokens: int = 0
    media_items: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a request as reported by its caller; `cached_tokens` is None if unknown."""

    reservation_id: str
    cached_tokens: int | None
    output_tokens: int


class Decisions:
    """The latest decisions of this replica, at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._records: OrderedDict[str, Decision] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, decision: Decision) -> None:
        """Adds a decision; replaces that of the same reservation, which was routed again."""
        self._records.pop(decision.reservation_id, None)
        self._records[decision.reservation_id] = decision
        if len(self._records) > self._most:
            self._records.popitem(last=False)

    def complete(self, outcome: Outcome) -> Decision | None:
        """Adds the outcome to its decision and returns that; None if it is complete or not recorded here."""
        decision = self._records.get(outcome.reservation_id)
        if decision is None or decision.delivered_cached_tokens is not None:
            return None
        decision.delivered_cached_tokens = outcome.cached_tokens
        decision.output_tokens = outcome.output_tokens
        return decision

    def latest(self, model: str, limit: int) -> Iterator[Decision]:
        """Yields decisions, newest first, of one model or of all models for an empty name."""
        for decision in reversed(self._records.values()):
            if limit <= 0:
                return
            if not model or decision.model == model:
                limit -= 1
                yield decision
