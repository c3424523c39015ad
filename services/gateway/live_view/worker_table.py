"""The workers as the page shows them: the router's word, this gateway's own links, and those that have just gone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from services.gateway.live_view.request_history import Finished, RequestHistory
from services.gateway.workers.overview import WorkerState

GONE_SHOWN_S = 60.0
MOST_GONE = 64
HIT_RATE_OF = 256
MOST_ROWS = 100


@dataclass(frozen=True, slots=True)
class LinkState:
    """What this gateway knows of a worker by itself.

    Attributes:
        connected: there is a session to it.
        sound: it answered its last requests.
        live: streams it runs for this gateway.
    """

    address: str
    model: str
    connected: bool
    sound: bool
    live: int


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; `hit_rate` is the cached share of prompt tokens of its last requests, None without any.

    `health` is "ok", "draining", "troubled" (its last requests failed), "unreachable" (no connection), "left" (after a
    drain) or "gone" (without one).
    """

    id: str
    health: str
    role: str
    model: str
    engine: str
    address: str
    live: int
    running: int
    waiting: int
    booked: int
    used: float
    cached: float
    step_ms: float
    hit_rate: float | None
    requests_s: float
    tokens_s: float


class WorkerTable:
    """Keeps rows in step with who is there; a worker that leaves stays for a minute, marked as gone."""

    def __init__(self, request_history: RequestHistory, clock: Callable[[], float] = monotonic) -> None:
        self._request_history = request_history
        self._clock = clock
        self._rows: dict[str, Row] = {}
        self._gone: dict[str, float] = {}
        self._counted: dict[str, tuple[int, int]] = {}

    @property
    def rows(self) -> Mapping[str, Row]:
        """By worker id."""
        return self._rows

    def shown(self) -> dict[str, Row]:
        """The rows that fit on a page: those in trouble, then the first by name."""
        if len(self._rows) <= MOST_ROWS:
            return dict(self._rows)
        chosen = sorted(self._rows.values(), key=lambda row: (row.health == "ok", row.id))[:MOST_ROWS]
        return {row.id: row for row in sorted(chosen, key=lambda row: row.id)}

    def update(self, links: Mapping[str, LinkState], states: Iterable[WorkerState], elapsed_s: float) -> None:
        """Takes in what is known now; `elapsed_s` is since the last time, for the rates."""
        told = {state.id: state for state in states}
        hits = hit_rates(list(self._request_history.recent)[-HIT_RATE_OF:])
        now = self._clock()
        rows = {}
        for worker_id in sorted(links.keys() | told.keys()):
            rates = self._rates(worker_id, elapsed_s)
            rows[worker_id] = _row(worker_id, links.get(worker_id), told.get(worker_id), hits.get(worker_id), rates)
        for worker_id in rows:
            self._gone.pop(worker_id, None)
        for worker_id in self._rows.keys() - rows.keys():
            self._gone.setdefault(worker_id, now)
        kept = sorted((at, worker_id) for worker_id, at in self._gone.items() if now - at < GONE_SHOWN_S)[-MOST_GONE:]
        self._gone = {worker_id: at for at, worker_id in kept}
        for worker_id in self._gone:
            rows[worker_id] = _departed(self._rows[worker_id])
        self._rows = rows
        self._counted = {worker_id: counted for worker_id, counted in self._counted.items() if worker_id in rows}
        self._request_history.forget_workers(set(rows))

    def _rates(self, worker_id: str, elapsed_s: float) -> tuple[float, float]:
        of_worker = self._request_history.workers.get(worker_id)
        now = (0, 0) if of_worker is None else (of_worker.requests, of_worker.output_tokens)
        before = self._counted.get(worker_id, now)
        self._counted[worker_id] = now
        return round((now[0] - before[0]) / elapsed_s, 1), round((now[1] - before[1]) / elapsed_s, 1)


def hit_rates(finished: Sequence[Finished]) -> dict[str, float]:
    """Share of prompt tokens that were cached, by the worker that got the prompt."""
    prompt: dict[str, int] = defaultdict(int)
    cached: dict[str, int] = defaultdict(int)
    for one in finished:
        if one.outcome == "finished":
            prompt[one.workers[0]] += one.prompt_tokens
            cached[one.workers[0]] += one.cached_tokens
    return {worker_id: round(cached[worker_id] / tokens, 3) for worker_id, tokens in prompt.items() if tokens}


def _row(
    worker_id: str,
    link: LinkState | None,
    state: WorkerState | None,
    hit_rate: float | None,
    rates: tuple[float, float],
) -> Row:
    total = (state.total_blocks if state else 0) or 1
    return Row(
        id=worker_id,
        health=_health(link, state),
        role=state.role if state else "aggregated",
        model=state.model if state else link.model if link else "",
        engine=f"{state.engine} {state.version}".strip() if state else "",
        address=state.address if state else link.address if link else "",
        live=link.live if link else 0,
        running=state.running if state else 0,
        waiting=state.waiting if state else 0,
        booked=state.booked if state else 0,
        used=round(state.used_blocks / total, 3) if state else 0.0,
        cached=round(min(state.cached_blocks / total, 1.0), 3) if state else 0.0,
        step_ms=state.step_ms if state else 0.0,
        hit_rate=hit_rate,
        requests_s=rates[0],
        tokens_s=rates[1],
    )


def _health(link: LinkState | None, state: WorkerState | None) -> str:
    if state is not None and state.draining:
        return "draining"
    if link is None or not link.connected:
        return "unreachable"
    return "ok" if link.sound else "troubled"


def _departed(row: Row) -> Row:
    return Row(
        id=row.id,
        health="left" if row.health in ("draining", "left") else "gone",
        role=row.role,
        model=row.model,
        engine=row.engine,
        address=row.address,
        live=0,
        running=0,
        waiting=0,
        booked=0,
        used=0.0,
        cached=0.0,
        step_ms=0.0,
        hit_rate=row.hit_rate,
        requests_s=0.0,
        tokens_s=0.0,
    )
