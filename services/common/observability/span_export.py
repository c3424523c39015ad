"""Sends spans to an OTLP collector from its own thread; a collector that hangs costs spans, never requests.

The queue is bounded, ending a span costs one append, and lost spans are counted and logged once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExportResult

log = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Spans that wait to be exported; further ones are dropped, and counted."""
MAX_AT_ONCE = 512
"""Spans that are exported in one call."""
EVERY_S = 0.5
SEND_S = 5.0
LAST_S = 2.0


class Exporter(Protocol):
    """Exports spans; implemented by the SDK's exporters."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult: ...

    def shutdown(self) -> None: ...


def otlp_exporter(endpoint: str, headers: Sequence[tuple[str, str]] = ()) -> Exporter:
    """Returns an exporter to an OTLP/gRPC collector; its own logging is disabled because `SpanExport` logs failures.

    Args:
        headers: metadata of every export.
    """
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    # The second logger would log malformed headers, which contain secrets.
    for name in ("opentelemetry.exporter", "opentelemetry.util.re"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return OTLPSpanExporter(endpoint=endpoint, headers=tuple(headers), timeout=SEND_S)


class SpanExport(SpanProcessor):
    """Collects ended spans and exports them in batches.

    Args:
        endpoint: the exporter's address, for log lines.
        most_waiting: maximum number of queued spans; further ones are dropped.

    Attributes:
        exported, failed, dropped: number of spans so far, by outcome.
    """

    def __init__(self, exporter: Exporter, endpoint: str, most_waiting: int = MAX_WAITING) -> None:
        self.exported = self.failed = self.dropped = 0
        self._exporter = exporter
        self._endpoint = endpoint
        self._waiting: deque[ReadableSpan] = deque()
        self._most_waiting = most_waiting
        self._wake = threading.Event()
        self._sending = False
        self._closing = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Does nothing."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a span, or drops it when the queue is full; never blocks."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if len(self._waiting) >= self._most_waiting or self._closing:
            self.dropped += 1
            return
        self._waiting.append(span)
        if len(self._waiting) >= MAX_AT_ONCE:
            self._wake.set()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(EVERY_S)
            self._wake.clear()
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        while self._waiting:
            self._sending = True
            self._send([self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_AT_ONCE))])
        self._sending = False

    def _send(self, spans: list[ReadableSpan]) -> None:
        try:
            sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # no exception of the exporter may end the thread
            log.debug("spans cannot be exported: %s", error)
            sent = False
        if sent:
            self.exported += len(spans)
        else:
            self.failed += len(spans)
        if sent == self._failing:
            self._failing = not sent
            if sent:
                log.info("span export recovered", extra={"lost": self.failed + self.dropped})
            else:
                log.warning(
                    "the trace collector at %s does not accept spans; they are dropped until it does",
                    self._endpoint,
                )

    def force_flush(self, timeout_millis: int = 2000) -> bool:
        """Waits until the queued spans are sent; returns False on timeout."""
        until_s = time.monotonic() + timeout_millis / 1000
        while self._waiting or self._sending:
            if time.monotonic() > until_s:
                return False
            self._wake.set()
            time.sleep(0.01)
        return True

    def shutdown(self) -> None:
        """Sends the remaining spans, waiting two seconds at most."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(LAST_S)
        if self._thread.is_alive():
            log.warning("spans are lost: the trace collector at %s no longer responds", self._endpoint)
        else:
            self._exporter.shutdown()
