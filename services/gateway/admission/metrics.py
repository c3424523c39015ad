"""What admission refuses, and how long requests wait in line; once a request."""

from __future__ import annotations

from collections.abc import Callable

from services.common.observability.instruments import Counter, Histogram, watch
from services.common.observability.label_bounds import Label
from services.gateway.metrics import METRICS

REASONS = (
    "no_key", "wrong_key", "model", "scope", "requests", "tokens", "concurrency", "request_too_large",
    "line_full", "line_timeout", "host", "origin",
)  # fmt: skip
REFUSED = METRICS.counter(
    "refused",
    "requests that admission refused",
    Label(
        "reason",
        "no valid key, a model or scope the key lacks, a limit of the key, the line, or the Host or Origin header",
        REASONS,
    ),
)
LINE_WAIT = METRICS.histogram(
    "line_wait",
    "time that requests waited for their turn, of those that had to wait",
    Label("outcome", "its turn came, it was refused, or its client left", ("turn", "refused", "left")),
    unit="s",
    when="the gateway was full",
)
WAITING = METRICS.gauge("waiting_requests", "requests in line")
ADMITTED = METRICS.gauge("admitted_requests", "requests let in and not over")


class AdmissionMetrics:
    """Instruments of one gateway's admission; make it after telemetry is configured.

    Args:
        waiting: requests in line now.
        admitted: requests let in now.
    """

    def __init__(self, waiting: Callable[[], int], admitted: Callable[[], int]) -> None:
        self._refused = Counter(REFUSED)
        self._wait = Histogram(LINE_WAIT)
        watch(WAITING, lambda: [(waiting(), {})])
        watch(ADMITTED, lambda: [(admitted(), {})])

    def refused(self, reason: str) -> None:
        """A request was refused; one of REASONS."""
        self._refused.add(1, {"reason": reason})

    def waited(self, seconds: float, outcome: str) -> None:
        """A request had to wait, and then its turn came, it was refused or its client left."""
        self._wait.record(seconds, {"outcome": outcome})
