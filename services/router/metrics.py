"""The router's instruments; one recording per request or per batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from services.common.observability.declarations import MODEL, Declared, MetricDeclarations
from services.common.observability.instruments import Counter, Gauge, Histogram, watch
from services.common.observability.label_bounds import Label

if TYPE_CHECKING:
    from services.router.scheduling.decisions import Decision
    from services.router.sync.model_state import ModelState

BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1)
WAITED_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

METRICS = MetricDeclarations("router")
QUERIES = METRICS.counter(
    "queries",
    "routing decisions",
    Label("policy", "that decided", most=20),
    Label("degraded", "why less was known than should be; empty: nothing was missing", most=20),
)
QUERY_SECONDS = METRICS.histogram("query_seconds", "time to decide", buckets=BUCKETS_S)
STAGE_SECONDS = METRICS.histogram(
    "stage_seconds",
    "time to decide, by part of the decision",
    Label("stage", "of the decision", ("hash", "prepare", "match", "choose")),
    buckets=BUCKETS_S,
)
WAITED_SECONDS = METRICS.histogram(
    "waited_seconds", "time in line", buckets=WAITED_BUCKETS_S, when="queries have waited (`--wait-ms`)"
)
WAITING = METRICS.gauge("waiting_queries", "queries in line because all workers are busy", MODEL)
RESERVATIONS = METRICS.counter("reservations", "reservations granted")
PROMPT_BLOCKS = METRICS.counter("prompt_blocks", "blocks of routed prompts")
OVERLAP_BLOCKS = METRICS.counter("overlap_blocks", "of them, blocks that the chosen worker held")
PREDICTED_TOKENS = METRICS.counter(
    "predicted_tokens", "cached tokens promised when deciding, of requests whose outcome is known"
)
BEST_TOKENS = METRICS.counter("best_tokens", "of the same requests, most cached tokens that any candidate had")
DELIVERED_TOKENS = METRICS.counter("delivered_tokens", "of the same requests, cached tokens that the worker found")
EXPIRED = METRICS.counter(
    "expired_reservations",
    "reservations nobody freed",
    Label("why", "what ended them", ("owner_gone", "not_on_worker")),
)
SHED = METRICS.counter("shed", "queries refused because all workers were busy")
PREFILL_INFERRED = METRICS.counter(
    "prefill_inferred", "prompts nobody marked as computed, known from the workers' reports"
)
EVENT_BATCHES = METRICS.counter(
    "event_batches",
    "KV-event batches of workers; a gap is kept back until a snapshot comes",
    Label("outcome", "what became of the batch", most=10, rare=True),
)
DISCONNECTED_WORKERS = METRICS.counter(
    "disconnected_workers",
    "workers disconnected by the router",
    Label("why", "error code, or silent", most=40, rare=True),
)
REFUSED = METRICS.counter(
    "refused_registrations", "registrations of workers refused", Label("code", "of the error", most=40, rare=True)
)
RESYNCS = METRICS.counter("resyncs", "snapshots asked for")
RELOADS = METRICS.counter(
    "reloads",
    "views read anew from the store",
    Label("reason", "why", ("start", "fell_behind", "store_returned")),
)
ATTACHED = METRICS.gauge("attached_workers", "workers attached to this router")
INDEX_BLOCKS = METRICS.gauge("index_blocks", "distinct blocks that workers reported", MODEL)
INDEX_AGE = METRICS.gauge(
    "index_age_seconds", "since the index was last known to be current", MODEL, unit="s", together="max"
)
PREDICTIONS = METRICS.gauge("predictions", "blocks expected on workers that have not reported them yet", MODEL)
BOOKED = METRICS.gauge("booked_requests", "reservations alive, of all replicas, as last read", MODEL)


class Metrics:
    """Make it after telemetry is configured."""

    def __init__(self) -> None:
        self.queries = Counter(QUERIES)
        self.query_seconds = Histogram(QUERY_SECONDS)
        self.stage_seconds = Histogram(STAGE_SECONDS)
        self.waited_seconds = Histogram(WAITED_SECONDS)
        self.reservations = Counter(RESERVATIONS)
        self.prompt_blocks = Counter(PROMPT_BLOCKS)
        self.overlap_blocks = Counter(OVERLAP_BLOCKS)
        self.predicted_tokens = Counter(PREDICTED_TOKENS)
        self.best_tokens = Counter(BEST_TOKENS)
        self.delivered_tokens = Counter(DELIVERED_TOKENS)
        self.expired = Counter(EXPIRED)
        self.shed = Counter(SHED)
        self.prefill_inferred = Counter(PREFILL_INFERRED)
        self.event_batches = Counter(EVENT_BATCHES)
        self.disconnected_workers = Counter(DISCONNECTED_WORKERS)
        self.refused = Counter(REFUSED)
        self.resyncs = Counter(RESYNCS)
        self.reloads = Counter(RELOADS)
        self.workers = Gauge(ATTACHED)

    def watch_views(self, views: Callable[[], Iterable[ModelState]], waiting: Callable[[str], int]) -> None:
        """Shows each model's index, its age, what is predicted, what is booked and who waits."""

        def gauge(declared: Declared, of: Callable[[ModelState], float]) -> None:
            watch(declared, lambda: [(of(view), {"model": view.model}) for view in list(views())])

        gauge(INDEX_BLOCKS, lambda view: view.index.distinct_blocks)
        gauge(INDEX_AGE, lambda view: view.age_ms / 1000)
        gauge(PREDICTIONS, lambda view: len(view.predictions))
        gauge(BOOKED, lambda view: sum(load.requests for load in list(view.loads.values())))
        gauge(WAITING, lambda view: waiting(view.model))

    def delivered(self, decision: Decision) -> None:
        """A decision's outcome is known: what was promised, possible and found."""
        self.predicted_tokens.add(decision.predicted_cached_tokens)
        self.best_tokens.add(decision.best_cached_tokens)
        self.delivered_tokens.add(decision.delivered_cached_tokens or 0)
