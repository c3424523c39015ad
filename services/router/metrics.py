"""Metrics of the router, recorded once per request or batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from services.common.observability.declarations import MODEL, Declared, MetricDeclarations
from services.common.observability.instruments import Counter, Gauge, Histogram, watch
from services.common.observability.label_bounds import NO_LABELS, Label

BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1)
WAITED_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

METRICS = MetricDeclarations("router")
QUERIES = METRICS.counter(
    "queries",
    "routing decisions",
    Label("policy", "routing policy used", most=20),
    Label("degraded", "why the decision used incomplete information; empty: it did not", most=20),
)
QUERY_SECONDS = METRICS.histogram("query_seconds", "duration of a routing decision", buckets=BUCKETS_S)
STAGE_SECONDS = METRICS.histogram(
    "stage_seconds",
    "duration of a routing decision by stage",
    Label("stage", "stage of the decision", ("hash", "prepare", "match", "choose")),
    buckets=BUCKETS_S,
)
WAITED_SECONDS = METRICS.histogram(
    "waited_seconds", "time in the admission queue", buckets=WAITED_BUCKETS_S, when="queries have waited (`--wait-ms`)"
)
WAITING = METRICS.gauge(
    "waiting_queries",
    "queries in the admission queue",
    MODEL,
    Label("for", "what they wait for", ("capacity", "workers")),
    when="queries wait (`--wait-ms`, `--wait-for-workers-ms`)",
)
TOKENIZING_FAILED = METRICS.counter(
    "tokenizing_failed",
    "queries routed by load alone because their prompt was not tokenized",
    Label("why", "reason", ("tokenizing_late", "tokenizing_failed")),
)
RESERVATIONS = METRICS.counter("reservations", "reservations granted")
PROMPT_BLOCKS = METRICS.counter("prompt_blocks", "blocks of the routed prompts")
OVERLAP_BLOCKS = METRICS.counter("overlap_blocks", "blocks of the routed prompts that the chosen worker held")
PREDICTED_TOKENS = METRICS.counter(
    "predicted_tokens", "cached tokens predicted by the decision, for requests with a reported outcome", MODEL
)
BEST_TOKENS = METRICS.counter(
    "best_tokens", "most cached tokens that any candidate had, for requests with a reported outcome", MODEL
)
DELIVERED_TOKENS = METRICS.counter(
    "delivered_tokens", "cached tokens that the worker used, for requests with a reported outcome", MODEL
)
MEDIA_ITEMS = METRICS.counter(
    "media_items",
    "media items in the prompts of granted reservations",
    MODEL,
    Label("result", "whether the chosen worker was predicted to have all of the item's tokens cached", ("hit", "miss")),
    when="prompts have images or other media items",
)
EXPIRED = METRICS.counter(
    "expired_reservations",
    "reservations released by the router because their owner did not free them",
    Label("why", "reason of the release", ("owner_gone", "not_on_worker")),
)
SHED = METRICS.counter("shed", "queries rejected because all workers were busy")
POLICY_FAILURES = METRICS.counter(
    "policy_failures",
    "rankings by composed policies that failed; policy kv routed these requests instead",
    Label("policy", "composed policy", most=20, rare=True),
    Label("why", "reason of the failure", ("raised", "slow", "died", "busy", "down")),
)
PREFILL_INFERRED = METRICS.counter(
    "prefill_inferred", "prompts found computed from the reports of workers before their owner marked them"
)
PICKER_REQUESTS = METRICS.counter(
    "picker_requests",
    "HTTP requests of the endpoint picker",
    Label("outcome", "completed, picked (the response did not pass), disconnected, shed or an error code", most=40),
    when="Envoy uses the endpoint picker (`--picker-listen`)",
)
PICKER_SECONDS = METRICS.histogram(
    "picker_seconds",
    "time from a request's complete body to its endpoint, including the admission queue",
    buckets=WAITED_BUCKETS_S,
    when="Envoy uses the endpoint picker (`--picker-listen`)",
)
PICKER_MOVED = METRICS.counter(
    "picker_moved",
    "bookings moved because another endpoint served the request",
    when="Envoy uses a fall-back of the endpoint picker",
)
PICKER_STREAMS = METRICS.gauge("picker_streams", "HTTP requests in progress at the endpoint picker")
EVENT_BATCHES = METRICS.counter(
    "event_batches",
    "KV event batches of workers; batches after a gap are buffered until a snapshot arrives",
    Label("outcome", "result of applying the batch", most=10, rare=True),
)
DISCONNECTED_WORKERS = METRICS.counter(
    "disconnected_workers",
    "workers disconnected by the router",
    Label("why", "error code, or silent", most=40, rare=True),
)
REFUSED = METRICS.counter(
    "refused_registrations", "rejected worker registrations", Label("code", "error code", most=40, rare=True)
)
RESYNCS = METRICS.counter("resyncs", "snapshots requested from workers")
RELOADS = METRICS.counter(
    "reloads",
    "model states reloaded from the store",
    Label("reason", "reason of the reload", ("start", "fell_behind", "store_returned")),
)
SET_ASIDE = METRICS.gauge(
    "set_aside_workers",
    "registered workers that receive no requests, because their tokenizer differs from that of their model's other "
    "workers or their server chose the model's name without proof, or one that belongs to another tokenizer",
    MODEL,
    Label("why", "reason", ("tokenizer_differs", "unproven_name", "name_pinned")),
    when="a worker is set aside",
)
ATTACHED = METRICS.gauge("attached_workers", "workers attached to this replica")
INDEX_BLOCKS = METRICS.gauge("index_blocks", "distinct blocks reported by workers", MODEL)
INDEX_AGE = METRICS.gauge(
    "index_age_seconds", "time since the index was last known to be current", MODEL, unit="s", together="max"
)
PREDICTIONS = METRICS.gauge("predictions", "blocks predicted on workers that have not reported them yet", MODEL)
BOOKED = METRICS.gauge("reserved_requests", "active reservations of all replicas, as last read", MODEL)


class IndexFigures(NamedTuple):
    """The index of one model, as this replica has it.

    Attributes:
        blocks: distinct blocks reported by workers.
        age_s: time since it was last known to be current, seconds.
        predictions: blocks predicted on workers that have not reported them yet.
        reserved: active reservations of all replicas.
    """

    model: str
    blocks: int
    age_s: float
    predictions: int
    reserved: int


class Metrics:
    """Instruments of the router; create them after telemetry is configured."""

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
        self._media_items = Counter(MEDIA_ITEMS)
        self.expired = Counter(EXPIRED)
        self.shed = Counter(SHED)
        self.tokenizing_failed = Counter(TOKENIZING_FAILED)
        self.policy_failures = Counter(POLICY_FAILURES)
        self.prefill_inferred = Counter(PREFILL_INFERRED)
        self.picker_requests = Counter(PICKER_REQUESTS)
        self.picker_seconds = Histogram(PICKER_SECONDS)
        self.picker_moved = Counter(PICKER_MOVED)
        self.picker_streams = 0
        watch(PICKER_STREAMS, lambda: [(self.picker_streams, NO_LABELS)])
        self.event_batches = Counter(EVENT_BATCHES)
        self.disconnected_workers = Counter(DISCONNECTED_WORKERS)
        self.refused = Counter(REFUSED)
        self.resyncs = Counter(RESYNCS)
        self.reloads = Counter(RELOADS)
        self.workers = Gauge(ATTACHED)

    def watch_queues(self, waiting: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """Registers the gauge of waiting queries, by model and what they wait for."""
        watch(WAITING, lambda: [(number, {"model": key[0], "for": key[1]}) for key, number in waiting().items()])

    def watch_indexes(self, figures: Callable[[], Iterable[IndexFigures]]) -> None:
        """Registers the gauges of each model: index size and age, predictions and reservations."""

        def gauge(declared: Declared, of: Callable[[IndexFigures], float]) -> None:
            watch(declared, lambda: [(of(index), {"model": index.model}) for index in figures()])

        gauge(INDEX_BLOCKS, lambda index: index.blocks)
        gauge(INDEX_AGE, lambda index: index.age_s)
        gauge(PREDICTIONS, lambda index: index.predictions)
        gauge(BOOKED, lambda index: index.reserved)

    def watch_set_aside(self, reasons: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """Registers the gauge of workers that are set aside, by model and reason."""
        watch(SET_ASIDE, lambda: [(number, {"model": key[0], "why": key[1]}) for key, number in reasons().items()])

    def decided(self, model: str, media_items: int, cached_media_items: int) -> None:
        """Records a granted reservation, and which media items of its prompt the worker was predicted to have."""
        self.reservations.add(1)
        if media_items:
            self._media_items.add(cached_media_items, {"model": model, "result": "hit"})
            self._media_items.add(media_items - cached_media_items, {"model": model, "result": "miss"})

    def delivered(self, model: str, predicted: int, best: int, delivered: int) -> None:
        """Records predicted, best possible and delivered cached tokens of a completed decision."""
        self.predicted_tokens.add(predicted, {"model": model})
        self.best_tokens.add(best, {"model": model})
        self.delivered_tokens.add(delivered, {"model": model})
