"""The worker's instruments, recorded once per request or read on scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from opentelemetry.metrics import CallbackOptions, Observation

from services.common.telemetry import meter
from services.worker.engine import Load
from services.worker.generation import FinishReason, Usage


class WorkerMetrics:
    """Makes the instruments; create it after telemetry is configured.

    Args:
        load: load by data-parallel rank, called from the scraping thread.
    """

    def __init__(self, load: Callable[[], Sequence[Load]]) -> None:
        instruments = meter("worker")
        self._load = load
        self._requests = instruments.create_counter("sluice_worker_requests", description="requests ended, by reason")
        self._refused = instruments.create_counter("sluice_worker_refused", description="requests refused, by error")
        self._prompt = instruments.create_counter("sluice_worker_prompt_tokens", description="prompt tokens served")
        self._cached = instruments.create_counter(
            "sluice_worker_cached_tokens", description="prompt tokens answered from the prefix cache"
        )
        self._output = instruments.create_counter("sluice_worker_output_tokens", description="tokens generated")
        self._first = instruments.create_histogram(
            "sluice_worker_time_to_first_token_seconds", unit="s", description="from acceptance to the first token"
        )
        self._duration = instruments.create_histogram(
            "sluice_worker_request_duration_seconds", unit="s", description="from acceptance to the terminal delta"
        )
        self._broken = instruments.create_counter(
            "sluice_worker_broken_contracts", description="times the engine broke its contract, by rule"
        )
        self._canaries = instruments.create_counter(
            "sluice_worker_canaries", description="tiny generations that watch the engine, by outcome"
        )
        self._embedded = instruments.create_counter("sluice_worker_embedded_inputs", description="inputs embedded")
        self._embedding = instruments.create_histogram(
            "sluice_worker_embedding_duration_seconds", unit="s", description="of one call"
        )
        for name, description in (
            ("running_requests", "requests in the running batch"),
            ("waiting_requests", "requests admitted and not in the batch yet"),
            ("used_blocks", "KV-cache blocks held by running requests"),
            ("cached_blocks", "KV-cache blocks that hold reusable prefixes"),
        ):
            instruments.create_observable_gauge(
                f"sluice_worker_{name}", callbacks=[self._observer(name)], description=description
            )

    def record(self, reason: FinishReason, usage: Usage, first_token_s: float | None, duration_s: float) -> None:
        """One request has ended."""
        self._requests.add(1, {"reason": reason.name.lower()})
        self._prompt.add(usage.prompt_tokens)
        self._cached.add(usage.cached_tokens)
        self._output.add(usage.completion_tokens)
        self._duration.record(duration_s)
        if first_token_s is not None:
            self._first.record(first_token_s)

    def record_refusal(self, kind: str) -> None:
        """One request was refused before an engine saw it."""
        self._refused.add(1, {"error": kind})

    def record_broken_contract(self, rule: str) -> None:
        """The engine did what its contract forbids."""
        self._broken.add(1, {"rule": rule})

    def record_canary(self, ok: bool) -> None:
        """The canary has tried."""
        self._canaries.add(1, {"outcome": "ok" if ok else "failed"})

    def record_embedding(self, inputs: int, prompt_tokens: int, duration_s: float) -> None:
        """One call has been answered."""
        self._embedded.add(inputs)
        self._prompt.add(prompt_tokens)
        self._embedding.record(duration_s)

    def _observer(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(getattr(load, name), {"rank": rank}) for rank, load in enumerate(self._load())]

        return observe
