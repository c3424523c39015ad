"""Records generations in the gateway's metrics: once each, at their end."""

from __future__ import annotations

from time import perf_counter

from services.common.observability.instruments import Counter, Histogram
from services.common.types.media.spans import items_within
from services.gateway import metrics
from services.gateway.streams.interfaces import StreamEnd
from services.gateway.streams.stream import GenerationStream


class GenerationMetrics:
    """A StreamObserver; create it after telemetry is configured."""

    def __init__(self) -> None:
        self._finished = Counter(metrics.GENERATIONS)
        self._prompt = Counter(metrics.PROMPT_TOKENS)
        self._cached = Counter(metrics.CACHED_TOKENS)
        self._output = Counter(metrics.OUTPUT_TOKENS)
        self._media_items = Counter(metrics.MEDIA_ITEMS)
        self._ttft, self._between = Histogram(metrics.TTFT), Histogram(metrics.BETWEEN)
        self._duration = Histogram(metrics.DURATION)

    def on_started(self, stream: GenerationStream) -> None:
        """See StreamObserver; counted at the end."""

    def on_assigned(self, stream: GenerationStream, worker_id: str) -> None:
        """See StreamObserver; not counted."""

    def on_ended(self, stream: GenerationStream, end: StreamEnd) -> None:
        """Counts a generation by its outcome, and records one that has finished."""
        outcome = end.outcome if end.error is None else end.error.kind.name.lower()
        self._finished.add(1, {"model": stream.model, "outcome": outcome})
        if end.finish is None:
            return
        of_model, now = {"model": stream.model}, perf_counter()
        self._prompt.add(stream.prompt_tokens, of_model)
        self._cached.add(stream.cached_tokens, of_model)
        self._output.add(stream.completion_tokens, of_model)
        if media := stream.prompt.media:
            hits = items_within((item.span for item in media), stream.cached_tokens)
            self._media_items.add(hits, {**of_model, "result": "hit"})
            self._media_items.add(len(media) - hits, {**of_model, "result": "miss"})
        self._duration.record(now - stream.started_at, of_model)
        if stream.first_text_at:
            self._ttft.record(stream.first_text_at - stream.started_at, of_model)
            if stream.completion_tokens > 1:
                self._between.record((now - stream.first_text_at) / (stream.completion_tokens - 1), of_model)
