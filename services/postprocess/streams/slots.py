"""Slots of a session that are in use, those used recently, and the columns that name them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from opentelemetry.trace import Span

from services.common.base.errors import not_found
from services.common.observability import telemetry
from services.postprocess.metrics import Metrics

REMEMBERED = 16_384


class Slots:
    """Tracks the slots of one session and their spans.

    Recently used slots are remembered, because tokens for them may still arrive.

    Attributes:
        live: slots in use.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.live: set[int] = set()
        self._metrics = metrics
        self._spans: dict[int, Span] = {}
        self._past: dict[int, None] = {}

    def take(self, slot: int, request_id: str, model: str, parent: Mapping[str, str]) -> None:
        """Marks a slot as used by a new stream."""
        self._metrics.lives(+1)
        self.live.add(slot)
        span = telemetry.start_span("postprocess.stream", parent, request_id=request_id, model=model)
        if span is not None:
            self._spans[slot] = span

    def fail(self, slot: int, message: str) -> None:
        """Records an error in the span of a slot's stream."""
        if slot in self._spans:
            telemetry.fail_span(self._spans[slot], message)

    def free(self, slot: int) -> None:
        """Frees and remembers a slot, whether or not it is in use."""
        self._past[slot] = None
        if len(self._past) > REMEMBERED:
            del self._past[next(iter(self._past))]
        if slot in self.live:
            self.live.discard(slot)
            self._metrics.lives(-1)
        if span := self._spans.pop(slot, None):
            span.end()

    def check_late(self, slot: int) -> None:
        """Raises SluiceError (NOT_FOUND) for tokens in a slot that was not used recently."""
        if slot not in self._past:
            raise not_found(
                f"Slot {slot} has no stream; open one before sending tokens.",
                param="tokens.slots",
                code="stream_unknown",
            )


def one_row_each(
    slots: array[int], counts: array[int], tokens: array[int]
) -> tuple[array[int], array[int], array[int]]:
    """Returns the columns with the rows of each slot, in order, as one row."""
    rows: dict[int, array[int]] = {}
    end = 0
    for slot, count in zip(slots, counts, strict=True):
        start, end = end, end + count
        if slot in rows:
            rows[slot] += tokens[start:end]
        else:
            rows[slot] = tokens[start:end]
    joined = array("I")
    for row in rows.values():
        joined += row
    return array("I", rows), array("I", map(len, rows.values())), joined
