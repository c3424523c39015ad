"""The router's instruments; one recording per request or per batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from opentelemetry.metrics import CallbackOptions, Observation

from services.common import telemetry
from services.router.decisions import Decision
from services.router.view import ModelView

BUCKETS_S = [1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1]


class Metrics:
    """Make it after telemetry is configured."""

    def __init__(self) -> None:
        meter = self._meter = telemetry.meter("router")
        self.queries = meter.create_counter(
            "sluice_router_queries", description="routing decisions, by policy and why they were degraded"
        )
        self.query_seconds = meter.create_histogram(
            "sluice_router_query_seconds",
            unit="s",
            description="time to decide",
            explicit_bucket_boundaries_advisory=BUCKETS_S,
        )
        self.stage_seconds = meter.create_histogram(
            "sluice_router_stage_seconds",
            unit="s",
            description="time to decide by stage: hash, prepare, match, choose (and book)",
            explicit_bucket_boundaries_advisory=BUCKETS_S,
        )
        self.waited_seconds = meter.create_histogram(
            "sluice_router_waited_seconds", unit="s", description="time in line, of queries that waited"
        )
        self.reservations = meter.create_counter("sluice_router_reservations", description="reservations granted")
        self.prompt_blocks = meter.create_counter("sluice_router_prompt_blocks", description="blocks of routed prompts")
        self.overlap_blocks = meter.create_counter(
            "sluice_router_overlap_blocks", description="of them, blocks that the chosen worker held"
        )
        self.predicted_tokens = meter.create_counter(
            "sluice_router_predicted_tokens",
            description="cached tokens promised when deciding, of requests whose outcome is known",
        )
        self.best_tokens = meter.create_counter(
            "sluice_router_best_tokens", description="of the same requests, most cached tokens any candidate had"
        )
        self.delivered_tokens = meter.create_counter(
            "sluice_router_delivered_tokens", description="of the same requests, cached tokens the worker found"
        )
        self.expired = meter.create_counter(
            "sluice_router_expired_reservations", description="reservations nobody freed, by what ended them"
        )
        self.shed = meter.create_counter("sluice_router_shed", description="queries refused because all were busy")
        self.computed_unsaid = meter.create_counter(
            "sluice_router_computed_unsaid", description="prompts nobody marked as computed, known from worker reports"
        )
        self.event_batches = meter.create_counter(
            "sluice_router_event_batches",
            description="KV-event batches by what became of them; gap: kept back until a snapshot comes",
        )
        self.cut_off = meter.create_counter("sluice_router_cut_off", description="workers cut off, by why")
        self.resyncs = meter.create_counter("sluice_router_resyncs", description="snapshots asked for")
        self.reloads = meter.create_counter(
            "sluice_router_reloads", description="views read anew from the store, by reason"
        )
        self.workers = meter.create_up_down_counter("sluice_router_attached_workers", description="workers attached")

    def watch_views(self, views: Callable[[], Iterable[ModelView]]) -> None:
        """Shows each model's index, its age, what is predicted and what is booked."""

        def gauge(name: str, unit: str, description: str, of: Callable[[ModelView], float]) -> None:
            def observe(options: CallbackOptions) -> Iterator[Observation]:
                for view in list(views()):
                    yield Observation(of(view), {"model": view.model})

            self._meter.create_observable_gauge(name, [observe], unit=unit, description=description)

        gauge(
            "sluice_router_index_blocks",
            "",
            "distinct blocks that workers reported",
            lambda view: view.index.distinct_blocks,
        )
        gauge(
            "sluice_router_index_age_seconds",
            "s",
            "since the index was last known to be current",
            lambda view: view.age_ms / 1000,
        )
        gauge("sluice_router_predictions", "", "predictions alive", lambda view: len(view.predictions))
        gauge(
            "sluice_router_booked_requests",
            "",
            "requests booked by all replicas, as last read",
            lambda view: sum(load.requests for load in list(view.loads.values())),
        )

    def delivered(self, decision: Decision) -> None:
        """A decision's outcome is known: what was promised, possible and found."""
        self.predicted_tokens.add(decision.predicted_cached_tokens)
        self.best_tokens.add(decision.best_cached_tokens)
        self.delivered_tokens.add(decision.delivered_cached_tokens or 0)
