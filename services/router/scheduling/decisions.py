"""Decision records: predicted, best possible and delivered cached tokens of routed requests."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from services.common.types.media.spans import items_within
from services.router.scheduling.queries import Query, RouteResult
from services.router.state.reservations.ids import unscoped
from services.router.state.workers.worker import Role, WorkerRank


@dataclass(slots=True)
class Decision:
    """Record of a query with a reservation. Lengths are tokens; `delivered_cached_tokens` is None until reported.

    Attributes:
        cached_media_items: those whose tokens are all among the predicted cached tokens.
    """

    reservation_id: str
    request_id: str
    model: str
    slot: WorkerRank | None
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
    cached_media_items: int = 0


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


def decision_on(query: Query, route: RouteResult) -> Decision:
    """Returns the record of a decision on a query with tokens, made now."""
    prefill, predicted = route.prefill_worker, route.predicted_cached_tokens
    prefill_slot = None if prefill is None else WorkerRank(prefill.worker_id, route.prefill_rank)
    slot: WorkerRank | None = WorkerRank(route.worker.worker_id, route.rank)
    if route.half is Role.PREFILL:
        prefill, prefill_slot, slot = route.worker, slot, None
    return Decision(
        route.reservation_id,
        unscoped(query.scope, query.request_id) if query.scope else query.request_id,
        query.model,
        slot,
        route.worker.address if slot is not None else "",
        prompt_tokens=route.prompt_tokens,
        predicted_cached_tokens=predicted,
        best_cached_tokens=max(route.best_overlap_blocks * route.block_size, predicted),
        decided_unix_ms=time.time_ns() // 1_000_000,
        decision_us=round(route.seconds * 1e6),
        policy=route.policy,
        degraded=route.degraded,
        waited_ms=route.waited_ms,
        session_hit=route.session_hit,
        prefill_slot=prefill_slot,
        prefill_address=prefill.address if prefill else "",
        media_items=len(query.prompt.media),
        cached_media_items=items_within(query.prompt.media, predicted) if query.prompt.media else 0,
    )
