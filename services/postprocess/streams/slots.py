"""Which slots of a session are in use, and which were."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.trace import Span

from services.common.errors import not_found
from services.common.observability import telemetry
from services.postprocess.metrics import Metrics

REMEMBERED = 16_384


class Slots:
    """The slots of one session. Of each in use it keeps the span; it counts them, and remembers the last ones that were
    in use: their tokens may still be under way.

    Attributes:
        live: those in use.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.live: set[int] = set()
        self._metrics = metrics
        self._spans: dict[int, Span] = {}
        self._past: dict[int, None] = {}

    def take(self, slot: int, request_id: str, model: str, parent: Mapping[str, str]) -> None:
        """A stream begins."""
        self._metrics.lives(+1)
        self.live.add(slot)
        span = telemetry.start_span("postprocess.stream", parent, request_id=request_id, model=model)
        if span is not None:
            self._spans[slot] = span

    def fail(self, slot: int, message: str) -> None:
        """Its stream ends with an error."""
        if slot in self._spans:
            telemetry.fail_span(self._spans[slot], message)

    def free(self, slot: int) -> None:
        """Its stream is over; one that was not in use is remembered, too."""
        self._past[slot] = None
        if len(self._past) > REMEMBERED:
            del self._past[next(iter(self._past))]
        if slot in self.live:
            self.live.discard(slot)
            self._metrics.lives(-1)
        if span := self._spans.pop(slot, None):
            span.end()

    def check_late(self, slot: int) -> None:
        """Tokens of a slot that is not in use: SluiceError(NOT_FOUND) unless its stream is over."""
        if slot not in self._past:
            raise not_found(f"No stream was opened in slot {slot}.", param="tokens.slots", code="stream_unknown")
