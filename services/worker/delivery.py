"""One live request as the worker sees it, between the engine that computes it and the caller who reads it."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence

from opentelemetry.trace import Span

from services.common import telemetry
from services.common.errors import SluiceError
from services.worker.delta_stream import DeltaStream
from services.worker.engine import GenerateContext, Sink
from services.worker.generation import Delta, FinishReason, PositionLogprobs, Usage

log = logging.getLogger(__name__)


class Delivery(Sink):
    """A sink that holds an engine to its word: begin, pushes, exactly one finish, nothing after it.

    Attributes:
        context: set by the worker when it takes the request.
        ended: the terminal delta was delivered; whatever the engine still says is dropped.
        first_token_s: when the engine began to answer, monotonic seconds; None before.
        delivered: tokens the caller got.
    """

    def __init__(self) -> None:
        self.context = GenerateContext("")
        self.ended = False
        self.started_s = time.monotonic()
        self.first_token_s: float | None = None
        self.delivered = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._span: Span | None = None
        self._on_end: Callable[[Delivery, FinishReason, Usage], None] | None = None

    def accept(
        self,
        context: GenerateContext,
        prompt_tokens: int,
        on_end: Callable[[Delivery, FinishReason, Usage], None],
    ) -> None:
        """The worker takes the request; `on_end` is called once, after the terminal delta."""
        self.context = context
        self._prompt_tokens = prompt_tokens
        self._on_end = on_end
        self._span = telemetry.start_span("engine.generate", context.trace, request=context.request_id)

    def refuse(self, error: SluiceError) -> None:
        """The engine did not take the request; the caller hears it another way."""
        self.ended = True
        self._end_span(FinishReason.ERROR, Usage(), error)

    def fail(self, error: SluiceError) -> None:
        """The worker ends the request; what the engine says from now on does not matter."""
        self.context.cancelled = True
        if not self.ended:
            usage = Usage(self._prompt_tokens, self.delivered, self._cached_tokens)
            self.finish(FinishReason.ERROR, usage, error=error)

    def begin(self, cached_tokens: int, prompt_logprobs: Sequence[PositionLogprobs] = ()) -> None:
        if not self.ended:
            self.first_token_s = time.monotonic()
            self._cached_tokens = cached_tokens
            self.deliver_first(cached_tokens, prompt_logprobs)

    def finish(
        self,
        reason: FinishReason,
        usage: Usage,
        *,
        stop_token_id: int | None = None,
        error: SluiceError | None = None,
        handoff: bytes = b"",
    ) -> None:
        if self.ended:
            if not self.context.cancelled:
                log.error("the engine ended a request twice", extra={"request": self.context.request_id})
            return
        self.ended = True
        self.deliver_terminal(
            Delta(finish_reason=reason, usage=usage, stop_token_id=stop_token_id, error=error, handoff=handoff)
        )
        self._end_span(reason, usage, error)
        if self._on_end is not None:
            self._on_end(self, reason, usage)

    @abstractmethod
    def deliver_first(self, cached_tokens: int, prompt_logprobs: Sequence[PositionLogprobs]) -> None:
        """What comes with the first tokens."""

    @abstractmethod
    def deliver_terminal(self, delta: Delta) -> None:
        """The last thing the caller hears."""

    def _end_span(self, reason: FinishReason, usage: Usage, error: SluiceError | None) -> None:
        if self._span is None:
            return
        self._span.set_attribute("finish_reason", reason.name.lower())
        self._span.set_attribute("prompt_tokens", usage.prompt_tokens)
        self._span.set_attribute("cached_tokens", usage.cached_tokens)
        self._span.set_attribute("completion_tokens", usage.completion_tokens)
        if error is not None:
            telemetry.fail_span(self._span, error.message)
        self._span.end()


class StreamDelivery(Delivery):
    """A delivery that is read as a stream by one caller."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = DeltaStream()
        self.deltas = self._stream.deltas

    def deliver_first(self, cached_tokens: int, prompt_logprobs: Sequence[PositionLogprobs]) -> None:
        self._stream.begin(cached_tokens, prompt_logprobs)

    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        if not self.ended:
            self.delivered += len(token_ids)
            self._stream.push(token_ids, logprobs)

    def deliver_terminal(self, delta: Delta) -> None:
        self._stream.end(delta)
