"""What the service counts; made after telemetry is configured, recorded per message and per stream."""

from __future__ import annotations

from services.common.observability.declarations import MetricDeclarations
from services.common.observability.instruments import Counter, Gauge, Histogram
from services.common.observability.label_bounds import Label
from services.postprocess.detokenize.stream import Finish, FinishReason

METRICS = MetricDeclarations("postprocess")

TOKENS = METRICS.counter("tokens", "tokens taken")
STREAMS = METRICS.gauge("streams", "streams alive")
BATCHES = METRICS.histogram(
    "batch",
    "time to make text of what came in one message",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1),
)
FINISHED = METRICS.counter(
    "finished_streams",
    "streams ended, by reason and by what was found",
    Label("reason", "why it ended", tuple(reason.name.lower() for reason in FinishReason)),
    Label("found", "what ended it here", ("stop_string", "stop_token", "none")),
)
DEGRADED = METRICS.counter(
    "degraded_streams",
    "fallbacks taken by parsed streams",
    Label("reason", "as the answer says it", most=40, rare=True),
)


class Metrics:
    """Instruments of one process."""

    def __init__(self) -> None:
        self._tokens = Counter(TOKENS)
        self._streams = Gauge(STREAMS)
        self._batches = Histogram(BATCHES)
        self._finished = Counter(FINISHED)
        self._degraded = Counter(DEGRADED)

    def degraded(self, reason: str) -> None:
        """A stream took a fallback."""
        self._degraded.add(1, {"reason": reason})

    def took(self, tokens: int) -> None:
        """A message with tokens."""
        self._tokens.add(tokens)

    def worked(self, seconds: float) -> None:
        """On one message."""
        self._batches.record(seconds)

    def lives(self, change: int) -> None:
        """Streams came or went."""
        self._streams.add(change)

    def finished(self, finish: Finish) -> None:
        """A stream ended with an answer."""
        found = "stop_string" if finish.stop_string else "stop_token" if finish.stop_token_id is not None else "none"
        self._finished.add(1, {"reason": finish.reason.name.lower(), "found": found})
