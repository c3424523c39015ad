"""The sink of one running request, between the engine that generates its tokens and the caller that receives them."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common.base.errors import SluiceError, internal
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import GenerateContext, Sink
from services.worker.contract.generation import Delta, FinishReason, PositionLogprobs, Usage
from services.worker.generation.tracing import GenerationSpan

if TYPE_CHECKING:
    from services.worker.contract.text_delta import TextUpdate

log = logging.getLogger(__name__)

WAITING, BEGUN, ENDED = 0, 1, 2
ANY_ID = 1 << 32


class ContractViolation(Exception):
    """An engine broke its contract; raised into the engine in strict mode, for tests."""


@dataclass(slots=True)
class SinkParams:
    """Callbacks and limits under which a sink accepts a request.

    Attributes:
        on_end: called once, after the terminal delta.
        on_violation: called with the contract rule that the engine broke; must fail the request.
        pack_handoff: wraps an engine's handoff and the span's traceparent into the handoff envelope.
        vocab_size: exclusive upper bound of token ids.
        strict: raise contract violations into the engine.
    """

    on_end: Callable[[ResponseSink, FinishReason, Usage], None]
    on_violation: Callable[[ResponseSink, str], None]
    pack_handoff: Callable[[bytes, str], bytes] = lambda payload, traceparent: payload
    vocab_size: int = ANY_ID
    strict: bool = False


class ResponseSink(Sink):
    """A sink that enforces the contract's call order: `begin`, any number of `push`, exactly one `finish`.

    It never raises into the engine, whose step it shares with other requests, unless it is strict: what cannot be
    delivered ends this request.

    Attributes:
        context: set when the worker accepts the request.
        first_token_s: when the engine called `begin`, monotonic seconds; None before.
        delivered: number of tokens delivered to the caller.
        prepared_prompt: ids of a prompt that the worker tokenized; the caller receives them with the first tokens.
    """

    def __init__(self) -> None:
        self.context = GenerateContext("")
        self.started_s = time.monotonic()
        self.first_token_s: float | None = None
        self.delivered = 0
        self.prepared_prompt: Sequence[int] = ()
        self._state = WAITING
        self._overruled = False  # ended by the worker; the engine may still push until it handles the abort
        self._vocab_size = ANY_ID
        self._prompt_tokens = 0
        self._cached_tokens: int | None = 0
        self._traced = False
        self._span: GenerationSpan | None = None
        self._params: SinkParams | None = None

    @property
    def ended(self) -> bool:
        """Whether the terminal delta was delivered; later output of the engine is dropped."""
        return self._state == ENDED

    @property
    def overruled(self) -> bool:
        """Whether the worker ended the request instead of the engine."""
        return self._overruled

    def accept(
        self, context: GenerateContext, prompt_tokens: int, params: SinkParams, span: GenerationSpan | None
    ) -> None:
        """Binds the sink to an accepted request; called again once the worker has prepared its prompt."""
        self.context = context
        self._prompt_tokens = prompt_tokens
        self._params = params
        self._vocab_size = params.vocab_size or ANY_ID
        self._span = span
        self._traced = span is not None

    def refuse(self, error: SluiceError) -> None:
        """Ends the request without a terminal delta; the caller receives `error` by other means."""
        self._state = ENDED
        if self._span is not None:
            self._span.end(FinishReason.ERROR, Usage(), error, cancelled=False)

    def fail(self, error: SluiceError) -> None:
        """Ends the request with `error` on behalf of the worker; later output of the engine is dropped."""
        self.context.cancelled = True
        if not self.ended:
            self._overruled = True
            usage = Usage(self._prompt_tokens, self.delivered, self._cached_tokens)
            self._end(Delta(finish_reason=FinishReason.ERROR, usage=usage, error=error))

    def withdraw(self) -> None:
        """Ends the request as cancelled before the engine received it."""
        self.context.cancelled = True
        if not self.ended:
            self._overruled = True
            self._end(Delta(finish_reason=FinishReason.CANCELLED, usage=Usage()))

    def begin(self, cached_tokens: int | None, prompt_logprobs: Sequence[PositionLogprobs] = ()) -> None:
        if self._state == WAITING:
            self._state = BEGUN
            self.first_token_s = time.monotonic()
            self._cached_tokens = cached_tokens
            try:
                self.deliver_first(cached_tokens, prompt_logprobs)
            except Exception:
                self.undeliverable()
        elif not self._overruled:
            self._violation("begins once" if self._state == BEGUN else "is silent after the end")

    def admits(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> bool:
        """Validates a push; returns False when it must be dropped. Subclasses may skip it for single plain tokens."""
        if self._overruled or not token_ids:
            return False
        if self._state == ENDED:
            return self._violation("is silent after the end")
        if self._state == WAITING:
            return self._violation("begins before it pushes")
        if max(token_ids) >= self._vocab_size or min(token_ids) < 0:
            return self._violation("gives ids of the vocabulary")
        if logprobs and len(logprobs) != len(token_ids):
            return self._violation("gives log-probabilities for every token of a push or for none")
        if self._span is not None:
            self._span.tokens(len(token_ids))
        return True

    def push_text(self, text: TextUpdate) -> None:
        if self._overruled:
            return
        if self._state == BEGUN:
            try:
                self.deliver_text(text)
            except Exception:
                self.undeliverable()
        else:
            self._violation("begins before it pushes" if self._state == WAITING else "is silent after the end")

    def finish(
        self,
        reason: FinishReason,
        usage: Usage,
        *,
        stop_token_id: int | None = None,
        error: SluiceError | None = None,
        handoff: bytes = b"",
    ) -> None:
        if self._state == ENDED:
            if not self._overruled:
                self._violation("ends a request once, not twice")
            return
        if handoff and self._params is not None:
            try:
                handoff = self._params.pack_handoff(handoff, self._span.traceparent if self._span is not None else "")
            except Exception:
                self.undeliverable()
                return
        if reason is FinishReason.ERROR and error is None:
            error = internal("The engine failed on this request.")
        self._end(Delta((), reason, usage, stop_token_id=stop_token_id, error=error, handoff=handoff))

    def _end(self, terminal: Delta) -> None:
        assert terminal.finish_reason is not None
        assert terminal.usage is not None
        self._state = ENDED
        try:
            self.deliver_terminal(terminal)
            if self._span is not None:
                self._span.end(terminal.finish_reason, terminal.usage, terminal.error, self.context.cancelled)
            if self._params is not None:
                self._params.on_end(self, terminal.finish_reason, terminal.usage)
        except Exception:
            log.exception("ending a request failed", extra={"request": self.context.request_id})

    def undeliverable(self) -> None:
        """Ends only this request; call it while the exception is handled. Raises ContractViolation in strict mode."""
        log.exception("output of a request cannot be delivered", extra={"request": self.context.request_id})
        self._violation("gives output that can be delivered")

    def _violation(self, rule: str) -> bool:
        log.error("engine broke its contract: an engine %s", rule, extra={"request": self.context.request_id})
        if self._params is not None:
            self._params.on_violation(self, rule)
            if self._params.strict:
                raise ContractViolation(f"An engine {rule}.")
        return False

    @abstractmethod
    def deliver_first(self, cached_tokens: int | None, prompt_logprobs: Sequence[PositionLogprobs]) -> None:
        """Delivers what accompanies the first tokens."""

    @abstractmethod
    def deliver_text(self, text: TextUpdate) -> None:
        """Delivers text produced from the tokens; never after the terminal delta."""

    @abstractmethod
    def deliver_terminal(self, delta: Delta) -> None:
        """Delivers the terminal delta, the last output of the request."""


class StreamResponseSink(ResponseSink):
    """A sink that one caller reads as a stream of deltas."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = DeltaStream()
        self.deltas = self._stream.deltas

    def deliver_first(self, cached_tokens: int | None, prompt_logprobs: Sequence[PositionLogprobs]) -> None:
        self._stream.begin(cached_tokens, prompt_logprobs)
        self._stream.prompt_token_ids = self.prepared_prompt

    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        try:
            if self.admits(token_ids, logprobs):
                self._stream.push(token_ids, logprobs)
                self.delivered += len(token_ids)
        except ContractViolation:
            raise
        except Exception:
            self.undeliverable()

    def deliver_text(self, text: TextUpdate) -> None:
        self._stream.push_text(text)

    def deliver_terminal(self, delta: Delta) -> None:
        self._stream.end(delta)
