"""The trace span of one generation: its request, token pace, and links to earlier parts."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from contextlib import AbstractContextManager

from opentelemetry.trace import Span

from services.common.base.errors import SluiceError
from services.common.observability import telemetry
from services.worker.contract.generation import FinishReason, GenerateRequest, Role, Usage

LINK = "link"
"""Key of a trace carrier that holds the traceparent of an earlier part of the same request."""


class GenerationSpan:
    """The `engine.generate` span, from acceptance to the terminal delta; created only while tracing is enabled."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._started_s = time.monotonic()
        self._last_s = 0.0
        self._first_s = 0.0
        self._gaps_ms = array("f")

    @property
    def traceparent(self) -> str:
        """The W3C traceparent header value, for links from other spans."""
        return self.carrier.get("traceparent", "")

    @property
    def carrier(self) -> dict[str, str]:
        """The W3C headers that make other spans children of this one."""
        return telemetry.headers(self._span)

    def active(self) -> AbstractContextManager[None]:
        """Returns a context manager that makes this the current span, also for tasks created inside."""
        return telemetry.activate(self._span)

    def tokens(self, count: int) -> None:
        """Records that `count` tokens arrived together."""
        now = time.monotonic()
        if not self._first_s:
            self._first_s = now
        else:
            self._gaps_ms.extend([(now - self._last_s) * 1e3 / count] * count)
        self._last_s = now

    def end(self, reason: FinishReason, usage: Usage, error: SluiceError | None, cancelled: bool) -> None:
        """Ends the span with the outcome of the generation."""
        span = self._span
        span.set_attributes(
            {
                "finish_reason": reason.name.lower(),
                "cancelled": cancelled or reason is FinishReason.CANCELLED,
                "input_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "output_tokens": usage.completion_tokens,
                **self._latencies(),
            }
        )
        if error is not None:
            span.set_attribute("error_kind", error.kind.name.lower())
            telemetry.fail_span(span, error.message)
        span.end()

    def _latencies(self) -> dict[str, float]:
        latencies = {"ttft_ms": (self._first_s - self._started_s) * 1e3} if self._first_s else {}
        if self._gaps_ms:
            gaps = sorted(self._gaps_ms)
            latencies["inter_token_ms_avg"] = sum(gaps) / len(gaps)
            latencies["inter_token_ms_p50"] = gaps[len(gaps) // 2]
            latencies["inter_token_ms_p99"] = gaps[min(int(len(gaps) * 0.99), len(gaps) - 1)]
            latencies["inter_token_ms_max"] = gaps[-1]
        return latencies


def open_span(
    request: GenerateRequest, role: Role, trace: Mapping[str, str], prefill_traceparent: str = ""
) -> GenerationSpan | None:
    """Starts the span of a request; returns None while tracing is disabled.

    Args:
        trace: carrier of the caller's span; after a migration, `LINK` holds the traceparent of the earlier part.
        prefill_traceparent: traceparent of the prefill span, for a decode request.
    """
    if not telemetry.tracing():
        return None
    span = telemetry.start_span(
        "engine.generate",
        {key: value for key, value in trace.items() if key != LINK},
        links=[link for link in (prefill_traceparent, trace.get(LINK, "")) if link],
        request_id=request.request_id,
        model=request.model,
        role=role.name.lower(),
        input_tokens=len(request.token_ids),
        resumed_tokens=request.resumed_tokens or None,
    )
    return None if span is None else GenerationSpan(span)
