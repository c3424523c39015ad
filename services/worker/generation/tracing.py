"""The span of one generation: what the engine was asked, how fast it answered, and what it continues."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from contextlib import AbstractContextManager

from opentelemetry.trace import Span

from services.common.errors import SluiceError
from services.common.observability import telemetry
from services.worker.contract.generation import FinishReason, GenerateRequest, Role, Usage

LINK = "link"
"""Key of a trace carrier: the traceparent of an earlier part of the same request."""


class GenerationSpan:
    """`engine.generate`, from acceptance to the terminal delta; made only while tracing is on."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._started_s = time.monotonic()
        self._last_s = 0.0
        self._first_s = 0.0
        self._gaps_ms = array("f")

    @property
    def traceparent(self) -> str:
        """W3C header value that others can link to."""
        return self.carrier.get("traceparent", "")

    @property
    def carrier(self) -> dict[str, str]:
        """W3C headers with which others become its children."""
        return telemetry.headers(self._span)

    def active(self) -> AbstractContextManager[None]:
        """Returns a block in which it is the current span, also of tasks that are created in the block."""
        return telemetry.activate(self._span)

    def tokens(self, count: int) -> None:
        """Tokens came together."""
        now = time.monotonic()
        if not self._first_s:
            self._first_s = now
        else:
            self._gaps_ms.extend([(now - self._last_s) * 1e3 / count] * count)
        self._last_s = now

    def end(self, reason: FinishReason, usage: Usage, error: SluiceError | None, cancelled: bool) -> None:
        """The terminal delta is out."""
        span = self._span
        span.set_attributes(
            {
                "finish_reason": reason.name.lower(),
                "cancelled": cancelled or reason is FinishReason.CANCELLED,
                "input_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "output_tokens": usage.completion_tokens,
                **self._pace(),
            }
        )
        if error is not None:
            span.set_attribute("error_kind", error.kind.name.lower())
            telemetry.fail_span(span, error.message)
        span.end()

    def _pace(self) -> dict[str, float]:
        pace = {"ttft_ms": (self._first_s - self._started_s) * 1e3} if self._first_s else {}
        if self._gaps_ms:
            gaps = sorted(self._gaps_ms)
            pace["inter_token_ms_avg"] = sum(gaps) / len(gaps)
            pace["inter_token_ms_p50"] = gaps[len(gaps) // 2]
            pace["inter_token_ms_p99"] = gaps[min(int(len(gaps) * 0.99), len(gaps) - 1)]
            pace["inter_token_ms_max"] = gaps[-1]
        return pace


def open_span(
    request: GenerateRequest, role: Role, trace: Mapping[str, str], handed_over_by: str = ""
) -> GenerationSpan | None:
    """The span of a request; None while tracing is off.

    Args:
        trace: carrier of the caller's span; under `LINK` the traceparent of an earlier part, after a migration.
        handed_over_by: traceparent of the prefill.
    """
    if not telemetry.tracing():
        return None
    span = telemetry.start_span(
        "engine.generate",
        {key: value for key, value in trace.items() if key != LINK},
        links=[link for link in (handed_over_by, trace.get(LINK, "")) if link],
        request_id=request.request_id,
        model=request.model,
        role=role.name.lower(),
        input_tokens=len(request.token_ids),
        resumed_tokens=request.resumed_tokens or None,
    )
    return None if span is None else GenerationSpan(span)
