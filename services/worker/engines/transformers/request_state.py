"""One request on the event loop: where its tokens go, and how it ended."""

from __future__ import annotations

from services.common.errors import SluiceError
from services.worker.contract.engine import Sink
from services.worker.contract.generation import FinishReason, GenerateRequest, PositionLogprobs, Usage
from services.worker.engines.transformers.sampling import SamplingPlan


class RequestState:
    """A request from submit to its terminal delta.

    Args:
        key: its name in the batching thread, never used twice.
        limit: most tokens it may get.

    Attributes:
        prompt_logprobs: come with its first token, where they were asked for.
    """

    __slots__ = ("_cached", "_last", "_sink", "_tokens", "key", "limit", "plan", "prompt_logprobs", "request")

    def __init__(self, key: str, request: GenerateRequest, sink: Sink, plan: SamplingPlan, limit: int) -> None:
        self.key = key
        self.request = request
        self.plan = plan
        self.limit = limit
        self.prompt_logprobs: list[PositionLogprobs] = []
        self._sink = sink
        self._tokens = 0
        self._cached = 0
        self._last = -1

    def begin(self, cached_tokens: int) -> None:
        """Right before its first token."""
        self._cached = cached_tokens
        self._sink.begin(cached_tokens, self.prompt_logprobs)

    def push(self, token_id: int, logprobs: PositionLogprobs | None) -> None:
        """Its next token."""
        self._tokens += 1
        self._last = token_id
        self._sink.push((token_id,), () if logprobs is None else (logprobs,))

    @property
    def reason(self) -> FinishReason:
        """Why the engine ended it."""
        return FinishReason.STOP if self._last in self.plan.stop_ids else FinishReason.LENGTH

    def finish(self, reason: FinishReason, error: SluiceError | None = None) -> None:
        """Its terminal delta."""
        usage = Usage(len(self.request.token_ids), self._tokens, self._cached)
        stop_token_id = self._last if reason is FinishReason.STOP else None
        self._sink.finish(reason, usage, stop_token_id=stop_token_id, error=error)
