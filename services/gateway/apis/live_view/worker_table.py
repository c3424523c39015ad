"""The table of workers: states from the router, this gateway's links, and recently removed workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from services.gateway.apis.live_view.request_history import Finished, RequestHistory
from services.gateway.backends.workers.overview import WorkerState

REMOVED_SHOWN_S = 60.0
MAX_REMOVED = 64
"""Removed workers that the live view still shows; the longest gone are left out."""
HIT_RATE_REQUESTS = 256
MAX_ROWS = 100
"""Workers that the live view shows, unhealthy ones first; the others are counted as hidden."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """State of this gateway's link to a worker.

    Attributes:
        connected: whether there is a session.
        healthy: whether its last requests succeeded.
        live: number of its streams from this gateway.
    """

    address: str
    model: str
    connected: bool
    healthy: bool
    live: int


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A row of the table.

    Attributes:
        health: "ok", "draining", "troubled" (its last requests failed), "unreachable" (no connection), "aside" (the
            router set it aside), "left" (removed after a drain) or "gone" (removed without one).
        why: the reason why it is set aside; else empty.
        hit_rate: cached share of the prompt tokens of its last requests; None without requests.
    """

    id: str
    health: str
    role: str = "aggregated"
    why: str = ""
    model: str = ""
    engine: str = ""
    address: str = ""
    live: int = 0
    running: int = 0
    waiting: int = 0
    booked: int = 0
    used: float = 0.0
    cached: float = 0.0
    step_ms: float = 0.0
    hit_rate: float | None = None
    requests_s: float = 0.0
    tokens_s: float = 0.0


class WorkerTable:
    """Maintains the rows; a removed worker is shown for another minute."""

    def __init__(self, request_history: RequestHistory, clock: Callable[[], float] = monotonic) -> None:
        self._request_history = request_history
        self._clock = clock
        self._rows: dict[str, WorkerRow] = {}
        self._removed: dict[str, float] = {}
        self._totals: dict[str, tuple[int, int]] = {}

    @property
    def rows(self) -> Mapping[str, WorkerRow]:
        """All rows by worker id."""
        return self._rows

    def shown(self) -> dict[str, WorkerRow]:
        """Returns the rows that fit on the page: unhealthy ones first, then by id."""
        if len(self._rows) <= MAX_ROWS:
            return dict(self._rows)
        chosen = sorted(self._rows.values(), key=lambda row: (row.health == "ok", row.id))[:MAX_ROWS]
        return {row.id: row for row in sorted(chosen, key=lambda row: row.id)}

    def update(self, links: Mapping[str, LinkState], states: Iterable[WorkerState], elapsed_s: float) -> None:
        """Updates the rows; `elapsed_s` is the time since the last update."""
        state_of = {state.id: state for state in states}
        hits = hit_rates(list(self._request_history.recent)[-HIT_RATE_REQUESTS:])
        now = self._clock()
        rows = {}
        for worker_id in sorted(links.keys() | state_of.keys()):
            rates = self._rates(worker_id, elapsed_s)
            rows[worker_id] = _row(worker_id, links.get(worker_id), state_of.get(worker_id), hits.get(worker_id), rates)
        for worker_id in rows:
            self._removed.pop(worker_id, None)
        for worker_id in self._rows.keys() - rows.keys():
            self._removed.setdefault(worker_id, now)
        shown = sorted((at, worker_id) for worker_id, at in self._removed.items() if now - at < REMOVED_SHOWN_S)
        self._removed = {worker_id: at for at, worker_id in shown[-MAX_REMOVED:]}
        for worker_id in self._removed:
            rows[worker_id] = _removed_row(self._rows[worker_id])
        self._rows = rows
        self._totals = {worker_id: totals for worker_id, totals in self._totals.items() if worker_id in rows}
        self._request_history.retain_workers(set(rows))

    def _rates(self, worker_id: str, elapsed_s: float) -> tuple[float, float]:
        totals = self._request_history.workers.get(worker_id)
        now = (0, 0) if totals is None else (totals.requests, totals.output_tokens)
        previous = self._totals.get(worker_id, now)
        self._totals[worker_id] = now
        return round((now[0] - previous[0]) / elapsed_s, 1), round((now[1] - previous[1]) / elapsed_s, 1)


def hit_rates(finished: Sequence[Finished]) -> dict[str, float]:
    """Returns the cached share of prompt tokens by the first worker of each request."""
    prompt: dict[str, int] = defaultdict(int)
    cached: dict[str, int] = defaultdict(int)
    for request in finished:
        if request.outcome == "finished":
            prompt[request.workers[0]] += request.prompt_tokens
            cached[request.workers[0]] += request.cached_tokens
    return {worker_id: round(cached[worker_id] / tokens, 3) for worker_id, tokens in prompt.items() if tokens}


def _row(
    worker_id: str,
    link: LinkState | None,
    state: WorkerState | None,
    hit_rate: float | None,
    rates: tuple[float, float],
) -> WorkerRow:
    row = WorkerRow(
        id=worker_id,
        health=_health(link, state),
        model=link.model if link else "",
        address=link.address if link else "",
        live=link.live if link else 0,
        hit_rate=hit_rate,
        requests_s=rates[0],
        tokens_s=rates[1],
    )
    if state is None:
        return row
    total = state.total_blocks or 1
    return replace(
        row,
        role=state.role,
        why=state.set_aside,
        model=state.model,
        engine=f"{state.engine} {state.version}".strip(),
        address=state.address,
        running=state.running,
        waiting=state.waiting,
        booked=state.booked,
        used=round(state.used_blocks / total, 3),
        cached=round(min(state.cached_blocks / total, 1.0), 3),
        step_ms=state.step_ms,
    )


def _health(link: LinkState | None, state: WorkerState | None) -> str:
    if state is not None and state.draining:
        return "draining"
    if state is not None and state.set_aside:
        return "aside"
    if link is None or not link.connected:
        return "unreachable"
    return "ok" if link.healthy else "troubled"


def _removed_row(row: WorkerRow) -> WorkerRow:
    health = "left" if row.health in ("draining", "left") else "gone"
    return WorkerRow(row.id, health, row.role, "", row.model, row.engine, row.address, hit_rate=row.hit_rate)
