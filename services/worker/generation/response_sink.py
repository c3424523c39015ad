"""One live request as the worker sees it, between the engine that computes it and the caller who reads it."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common.errors import SluiceError, internal
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import GenerateContext, Sink
from services.worker.contract.generation import Delta, FinishReason, PositionLogprobs, Usage
from services.worker.generation.tracing import GenerationSpan

if TYPE_CHECKING:
    from services.worker.generation.text_delta import TextDelta

log = logging.getLogger(__name__)

WAITING, BEGUN, ENDED = 0, 1, 2
ANY_ID = 1 << 32


class ContractViolation(Exception):
    """An engine did what the contract forbids; raised into the engine in tests, where it must not be overlooked."""


@dataclass(slots=True)
class SinkParams:
    """What the worker holds an engine to, and what it hears of a request.

    Attributes:
        vocab_size: token ids must be below it.
        strict: raise what is wrong into the engine.
        on_end: called once, after the terminal delta.
        on_broken: called with the rule that the engine broke; the request is to be failed.
        seal: puts an engine's handoff into its envelope.
    """

    on_end: Callable[[ResponseSink, FinishReason, Usage], None]
    on_broken: Callable[[ResponseSink, str], None]
    seal: Callable[[bytes, str], bytes] = lambda payload, traceparent: payload
    vocab_size: int = ANY_ID
    strict: bool = False


class ResponseSink(Sink):
    """A sink that holds an engine to its word: begin, pushes, exactly one finish, nothing after it.

    Attributes:
        context: set by the worker when it takes the request.
        first_token_s: when the engine began to answer, monotonic seconds; None before.
        delivered: tokens the caller got.
        made_prompt: ids of a prompt that the worker made; the caller hears them with the first tokens.
    """

    def __init__(self) -> None:
        self.context = GenerateContext("")
        self.started_s = time.monotonic()
        self.first_token_s: float | None = None
        self.delivered = 0
        self.made_prompt: Sequence[int] = ()
        self._state = WAITING
        self._overruled = False  # the worker ended it; the engine may not know yet
        self._vocab_size = ANY_ID
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._traced = False
        self._span: GenerationSpan | None = None
        self._terms: SinkParams | None = None

    @property
    def ended(self) -> bool:
        """The terminal delta was delivered; whatever the engine still says is dropped."""
        return self._state == ENDED

    @property
    def overruled(self) -> bool:
        """The worker ended it, not the engine."""
        return self._overruled

    def accept(
        self, context: GenerateContext, prompt_tokens: int, terms: SinkParams, span: GenerationSpan | None
    ) -> None:
        """The worker takes the request; again, with more known, once it has made its prompt."""
        self.context = context
        self._prompt_tokens = prompt_tokens
        self._terms = terms
        self._vocab_size = terms.vocab_size or ANY_ID
        self._span = span
        self._traced = span is not None

    def refuse(self, error: SluiceError) -> None:
        """The engine did not take the request; the caller hears it another way."""
        self._state = ENDED
        if self._span is not None:
            self._span.end(FinishReason.ERROR, Usage(), error, cancelled=False)

    def fail(self, error: SluiceError) -> None:
        """The worker ends the request; what the engine says from now on does not matter."""
        self.context.cancelled = True
        if not self.ended:
            self._overruled = True
            usage = Usage(self._prompt_tokens, self.delivered, self._cached_tokens)
            self._end(Delta(finish_reason=FinishReason.ERROR, usage=usage, error=error))

    def withdraw(self) -> None:
        """The worker ends it as cancelled; the engine never had it."""
        self.context.cancelled = True
        if not self.ended:
            self._overruled = True
            self._end(Delta(finish_reason=FinishReason.CANCELLED, usage=Usage()))

    def begin(self, cached_tokens: int, prompt_logprobs: Sequence[PositionLogprobs] = ()) -> None:
        if self._state == WAITING:
            self._state = BEGUN
            self.first_token_s = time.monotonic()
            self._cached_tokens = cached_tokens
            self.deliver_first(cached_tokens, prompt_logprobs)
        elif not self._overruled:
            self._broken("begins once" if self._state == BEGUN else "is silent after the end")

    def admits(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> bool:
        """Checks a push; False: drop it. Sinks call it for every push but the plainest kind."""
        if self._overruled or not token_ids:
            return False
        if self._state == ENDED:
            return self._broken("is silent after the end")
        if self._state == WAITING:
            return self._broken("begins before it pushes")
        if max(token_ids) >= self._vocab_size or min(token_ids) < 0:
            return self._broken("gives ids of the vocabulary")
        if logprobs and len(logprobs) != len(token_ids):
            return self._broken("gives log-probabilities for every token of a push or for none")
        if self._span is not None:
            self._span.tokens(len(token_ids))
        return True

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
                self._broken("ends a request once, not twice")
            return
        if handoff and self._terms is not None:
            handoff = self._terms.seal(handoff, self._span.traceparent if self._span is not None else "")
        if reason is FinishReason.ERROR and error is None:
            error = internal("The engine failed on this request.")
        self._end(Delta((), reason, usage, stop_token_id=stop_token_id, error=error, handoff=handoff))

    def _end(self, terminal: Delta) -> None:
        assert terminal.finish_reason is not None
        assert terminal.usage is not None
        self._state = ENDED
        self.deliver_terminal(terminal)
        if self._span is not None:
            self._span.end(terminal.finish_reason, terminal.usage, terminal.error, self.context.cancelled)
        if self._terms is not None:
            self._terms.on_end(self, terminal.finish_reason, terminal.usage)

    def _broken(self, rule: str) -> bool:
        log.error("the engine broke its contract: an engine %s", rule, extra={"request": self.context.request_id})
        if self._terms is not None:
            self._terms.on_broken(self, rule)
            if self._terms.strict:
                raise ContractViolation(f"An engine {rule}.")
        return False

    @abstractmethod
    def deliver_first(self, cached_tokens: int, prompt_logprobs: Sequence[PositionLogprobs]) -> None:
        """What comes with the first tokens."""

    @abstractmethod
    def deliver_text(self, text: TextDelta) -> None:
        """What tokens became; before the terminal delta."""

    @abstractmethod
    def deliver_terminal(self, delta: Delta) -> None:
        """The last thing the caller hears."""


class StreamResponseSink(ResponseSink):
    """A delivery that is read as a stream by one caller."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = DeltaStream()
        self.deltas = self._stream.deltas

    def deliver_first(self, cached_tokens: int, prompt_logprobs: Sequence[PositionLogprobs]) -> None:
        self._stream.begin(cached_tokens, prompt_logprobs)
        self._stream.prompt_token_ids = self.made_prompt

    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        if self.admits(token_ids, logprobs):
            self.delivered += len(token_ids)
            self._stream.push(token_ids, logprobs)

    def deliver_text(self, text: TextDelta) -> None:
        self._stream.say(text)

    def deliver_terminal(self, delta: Delta) -> None:
        self._stream.end(delta)
