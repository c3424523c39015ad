"""A mock engine that opens spans as foreign code does: by OpenTelemetry's API, with nothing of Sluice's."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from opentelemetry import trace

from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import GenerateContext, LLMEngine, Sink
from services.worker.contract.generation import Delta, GenerateRequest
from services.worker.engines.mock import MockEngine

TRACER = trace.get_tracer("an engine")
FIRST, EACH = "engine.wait_for_first", "engine.hand_out"


class SpanningEngine(MockEngine):
    """A span around the wait for the first delta, and one around each delta that is handed out."""

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        if isinstance(sink, DeltaStream):  # from the mock's own `generate`
            super().submit(request, context, sink)
        else:
            LLMEngine.submit(self, request, context, sink)

    def abort(self, context: GenerateContext) -> None:
        LLMEngine.abort(self, context)
        super().abort(context)

    async def generate(self, request: GenerateRequest, context: GenerateContext) -> AsyncGenerator[Delta, None]:
        async with aclosing(super().generate(request, context)) as deltas:
            with TRACER.start_as_current_span(FIRST):
                first = await anext(deltas)
            yield first
            async for delta in deltas:
                with TRACER.start_as_current_span(EACH):
                    yield delta
