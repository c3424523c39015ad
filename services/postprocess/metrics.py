"""Metrics of postprocess, recorded per message and per stream."""

from __future__ import annotations

from services.common.observability.declarations import MetricDeclarations
from services.common.observability.instruments import Counter, Gauge, Histogram
from services.common.observability.label_bounds import Label
from services.postprocess.detokenize.stream import Finish, FinishReason

METRICS = MetricDeclarations("postprocess")

TOKENS = METRICS.counter("tokens", "tokens received")
STREAMS = METRICS.gauge("streams", "open streams")
BATCHES = METRICS.histogram(
    "batch",
    "time to process one message",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1),
)
FINISHED = METRICS.counter(
    "finished_streams",
    "finished streams",
    Label("reason", "finish reason", tuple(reason.name.lower() for reason in FinishReason)),
    Label("found", "stop condition detected by postprocess", ("stop_string", "stop_token", "none")),
)
DEGRADED = METRICS.counter(
    "degraded_streams",
    "fallbacks in parsed streams",
    Label("reason", "reason of the fallback, as in the response", most=40, rare=True),
)


class Metrics:
    """Instruments of one process; create them after telemetry is configured."""

    def __init__(self) -> None:
        self._tokens = Counter(TOKENS)
        self._streams = Gauge(STREAMS)
        self._batches = Histogram(BATCHES)
        self._finished = Counter(FINISHED)
        self._degraded = Counter(DEGRADED)

    def degraded(self, reason: str) -> None:
        """Counts a fallback of a parsed stream."""
        self._degraded.add(1, {"reason": reason})

    def took(self, tokens: int) -> None:
        """Counts received tokens."""
        self._tokens.add(tokens)

    def worked(self, seconds: float) -> None:
        """Records the processing time of one message."""
        self._batches.record(seconds)

    def lives(self, change: int) -> None:
        """Changes the number of open streams."""
        self._streams.add(change)

    def finished(self, finish: Finish) -> None:
        """Counts a finished stream."""
        found = "stop_string" if finish.stop_string else "stop_token" if finish.stop_token_id is not None else "none"
        self._finished.add(1, {"reason": finish.reason.name.lower(), "found": found})
