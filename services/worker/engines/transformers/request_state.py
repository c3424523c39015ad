"""State of one request on the event loop."""

from __future__ import annotations

from services.common.base.errors import SluiceError
from services.worker.contract.engine import Sink
from services.worker.contract.generation import FinishReason, GenerateRequest, PositionLogprobs, Usage
from services.worker.engines.transformers.sampling import SamplingPlan


class RequestState:
    """Forwards the tokens of one request to its sink and counts usage.

    Args:
        key: Unique key of the request in the batching thread.
        limit: Maximum number of tokens to generate.

    Attributes:
        prompt_logprobs: Log-probabilities of the prompt, sent with the first token; empty if not requested.
    """

    __slots__ = (
        "_cached_tokens",
        "_completion_tokens",
        "_last_token_id",
        "_sink",
        "key",
        "limit",
        "plan",
        "prompt_logprobs",
        "request",
    )

    def __init__(self, key: str, request: GenerateRequest, sink: Sink, plan: SamplingPlan, limit: int) -> None:
        self.key = key
        self.request = request
        self.plan = plan
        self.limit = limit
        self.prompt_logprobs: list[PositionLogprobs] = []
        self._sink = sink
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._last_token_id = -1

    def begin(self, cached_tokens: int) -> None:
        """Starts the output; called before the first token."""
        self._cached_tokens = cached_tokens
        self._sink.begin(cached_tokens, self.prompt_logprobs)

    def push(self, token_id: int, logprobs: PositionLogprobs | None) -> None:
        """Appends one token."""
        self._completion_tokens += 1
        self._last_token_id = token_id
        self._sink.push((token_id,), () if logprobs is None else (logprobs,))

    @property
    def reason(self) -> FinishReason:
        """The reason of a regular end."""
        return FinishReason.STOP if self._last_token_id in self.plan.stop_ids else FinishReason.LENGTH

    def finish(self, reason: FinishReason, error: SluiceError | None = None) -> None:
        """Finishes the sink."""
        usage = Usage(len(self.request.token_ids), self._completion_tokens, self._cached_tokens)
        stop_token_id = self._last_token_id if reason is FinishReason.STOP else None
        self._sink.finish(reason, usage, stop_token_id=stop_token_id, error=error)
