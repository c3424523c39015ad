"""One generation's answers, from the server's messages to deltas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.worker.contract.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    Role,
    Usage,
)
from services.worker.engines.vllm.handoff import Handoff
from services.worker.engines.vllm_grpc import wire


class Reading:
    """Keeps what a terminal delta has to say.

    Attributes:
        ended: the terminal delta was given.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.ended = False
        self._request = request
        self._begun = False
        self._tokens = 0
        self._cached = 0
        self._last: int | None = None

    def take(self, response: Any) -> Delta | None:
        """What one message means; None: nothing yet."""
        if response.WhichOneof("response") == "complete":
            return self._complete(response.complete)
        return self._chunk(response.chunk) if response.chunk.token_ids else None

    def _chunk(self, chunk: Any) -> Delta:
        token_ids = list(chunk.token_ids)
        self._tokens += len(token_ids)
        self._last = token_ids[-1]
        top, prompt_top = self._request.logprobs, self._request.prompt_logprobs
        positions: Sequence[PositionLogprobs] = (
            () if top is None else wire.read_logprobs(chunk.output_logprobs, token_ids, top)
        )
        if self._begun:
            return Delta(token_ids, logprobs=positions)
        self._begun = True
        self._cached = min(chunk.cached_tokens, len(self._request.token_ids))
        prompt: Sequence[PositionLogprobs] = ()
        if prompt_top is not None:
            prompt = wire.read_prompt_logprobs(chunk.input_logprobs, prompt_top)
        return Delta(token_ids, cached_tokens=self._cached, logprobs=positions, prompt_logprobs=prompt)

    def _complete(self, complete: Any) -> Delta:
        self.ended = True
        reason, stop_token, error = wire.read_finish(complete)
        handoff = b""
        if reason is FinishReason.LENGTH and self._hands_over and self._last is not None:
            reason, handoff = FinishReason.HANDOFF, Handoff(self._last, wire.read_transfer(complete)).pack()
        if reason is FinishReason.STOP and stop_token is None:
            stop_token = self._last
        return Delta(
            finish_reason=reason,
            usage=Usage(len(self._request.token_ids), self._tokens, self._cached),
            stop_token_id=stop_token,
            error=error,
            handoff=handoff,
        )

    @property
    def _hands_over(self) -> bool:
        split = self._request.disaggregation
        return split is not None and split.role is Role.PREFILL
