"""Metrics of admission: rejected requests and waits in the queue."""

from __future__ import annotations

from collections.abc import Callable

from services.common.observability.instruments import Counter, Histogram, watch
from services.common.observability.label_bounds import Label
from services.gateway.metrics import METRICS

REASONS = (
    "no_key", "wrong_key", "model", "scope", "requests", "tokens", "concurrency", "request_too_large", "tenant",
    "queue_full", "queue_timeout", "host", "origin", "content_type",
)  # fmt: skip
REFUSED = METRICS.counter(
    "refused",
    "requests rejected by admission",
    Label(
        "reason",
        "missing or invalid key, model or scope not allowed, limit of the key or its tenant, queue, Host, Origin or "
        "type of a body",
        REASONS,
    ),
)
QUEUE_WAIT = METRICS.histogram(
    "queue_wait",
    "time that requests waited in the queue, of those that had to wait",
    Label("outcome", "admitted, rejected, or client disconnected", ("turn", "refused", "left")),
    unit="s",
    when="the gateway was full",
)
WAITING = METRICS.gauge("waiting_requests", "requests in the queue")
ADMITTED = METRICS.gauge("admitted_requests", "requests admitted and not completed")


class AdmissionMetrics:
    """Instruments of a gateway's admission; create it after telemetry is configured.

    Args:
        waiting: returns the number of queued requests.
        admitted: returns the number of admitted requests.
    """

    def __init__(self, waiting: Callable[[], int], admitted: Callable[[], int]) -> None:
        self._refused = Counter(REFUSED)
        self._wait = Histogram(QUEUE_WAIT)
        watch(WAITING, lambda: [(waiting(), {})])
        watch(ADMITTED, lambda: [(admitted(), {})])

    def refused(self, reason: str) -> None:
        """Counts a rejected request; `reason` is one of REASONS."""
        self._refused.add(1, {"reason": reason})

    def waited(self, seconds: float, outcome: str) -> None:
        """Records the wait of a queued request and its outcome."""
        self._wait.record(seconds, {"outcome": outcome})
