"""The gateway's metrics; all per request, none per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from opentelemetry.metrics import Observation

from services.common import telemetry
from services.common.errors import SluiceError

if TYPE_CHECKING:
    from services.gateway.live_stream import LiveStream


class GatewayMetrics:
    """Instruments of one gateway process; make it after telemetry is configured."""

    def __init__(self) -> None:
        meter = telemetry.meter("gateway")
        self._finished = meter.create_counter("sluice_gateway_generations", description="generations by outcome")
        self._prompt = meter.create_counter("sluice_gateway_prompt_tokens", description="prompt tokens served")
        self._cached = meter.create_counter("sluice_gateway_cached_tokens", description="of them from prefix caches")
        self._output = meter.create_counter("sluice_gateway_output_tokens", description="tokens generated")
        self._ttft = meter.create_histogram(
            "sluice_gateway_time_to_first_token",
            unit="s",
            description="from start of the generation to its first text",
            explicit_bucket_boundaries_advisory=[
                0.001,
                0.0025,
                0.005,
                0.01,
                0.025,
                0.05,
                0.1,
                0.25,
                0.5,
                1,
                2.5,
                5,
                10,
            ],
        )
        self._between = meter.create_histogram(
            "sluice_gateway_inter_token",
            unit="s",
            description="mean time between the tokens of a generation",
            explicit_bucket_boundaries_advisory=[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1],
        )
        self._http = meter.create_counter("sluice_gateway_http_requests", description="HTTP answers by path and status")
        self._degraded = meter.create_counter("sluice_gateway_degraded", description="fallbacks taken, by reason")
        self._migrations = meter.create_counter(
            "sluice_gateway_migrations", description="generations whose worker was lost, by what became of them"
        )
        self._text_moves = meter.create_counter(
            "sluice_gateway_text_moves", description="streams taken up by another postprocess replica, by cause"
        )
        self._trouble = meter.create_counter(
            "sluice_gateway_calls_in_trouble", description="calls retried, hedged or refused by a circuit, by service"
        )

    def watch(self, live_streams: Callable[[], int]) -> None:
        """Shows how many generations are under way."""
        telemetry.meter("gateway").create_observable_gauge(
            "sluice_gateway_live_streams",
            [lambda options: [Observation(live_streams())]],
            description="generations under way",
        )

    def finished(self, stream: LiveStream, now: float) -> None:
        """A generation came to its end."""
        of_model = {"model": stream.model}
        self._finished.add(1, {"model": stream.model, "outcome": "finished"})
        self._prompt.add(stream.prompt_tokens, of_model)
        self._cached.add(stream.cached_tokens, of_model)
        self._output.add(stream.completion_tokens, of_model)
        if stream.first_text_at:
            self._ttft.record(stream.first_text_at - stream.started_at, of_model)
            if stream.completion_tokens > 1:
                self._between.record((now - stream.first_text_at) / (stream.completion_tokens - 1), of_model)

    def cancelled(self, model: str) -> None:
        """The client went away."""
        self._finished.add(1, {"model": model, "outcome": "cancelled"})

    def failed(self, model: str, error: SluiceError) -> None:
        """A generation failed."""
        self._finished.add(1, {"model": model, "outcome": error.kind.name.lower()})

    def answered(self, path: str, status: int) -> None:
        """An HTTP request was answered."""
        self._http.add(1, {"path": path, "status": str(status)})

    def degraded(self, reason: str) -> None:
        """A fallback was taken."""
        self._degraded.add(1, {"reason": reason})

    def migration(self, outcome: str) -> None:
        """A worker was lost: the generation "moved", found "nobody", or had to stay and why."""
        self._migrations.add(1, {"outcome": outcome})

    def text_moved(self, cause: str) -> None:
        """Another postprocess replica took a stream up, because the first was "lost" or "drained"."""
        self._text_moves.add(1, {"cause": cause})

    def trouble(self, service: str, what: str) -> None:
        """A call was retried, hedged or refused; see ReplicaSet.on_event."""
        self._trouble.add(1, {"service": service, "what": what})
