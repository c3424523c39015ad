"""Converts the server's responses of one generation into deltas."""

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
from services.worker.engines.shared.media_prompts import check_length
from services.worker.engines.vllm.handoff import Handoff
from services.worker.engines.vllm_grpc import wire


class ResponseReader:
    """Converts responses into deltas and counts usage for the terminal one.

    Attributes:
        ended: Whether the terminal delta was returned.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.ended = False
        self._request = request
        self._begun = False
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._last_token_id: int | None = None

    def take(self, response: Any) -> Delta | None:
        """Returns the delta of one response; None if the response is empty.

        Raises:
            SluiceError: INTERNAL when the server expanded the images of the prompt otherwise.
        """
        if response.WhichOneof("response") == "complete":
            return self._complete(response.complete)
        return self._chunk(response.chunk) if response.chunk.token_ids else None

    def _chunk(self, chunk: Any) -> Delta:
        token_ids = list(chunk.token_ids)
        self._completion_tokens += len(token_ids)
        self._last_token_id = token_ids[-1]
        top, prompt_top = self._request.logprobs, self._request.prompt_logprobs
        positions: Sequence[PositionLogprobs] = (
            () if top is None else wire.read_logprobs(chunk.output_logprobs, token_ids, top)
        )
        if self._begun:
            return Delta(token_ids, logprobs=positions)
        self._begun = True
        if self._request.media:
            check_length(chunk.prompt_tokens, len(self._request.token_ids))
        self._cached_tokens = min(chunk.cached_tokens, len(self._request.token_ids))
        prompt: Sequence[PositionLogprobs] = ()
        if prompt_top is not None:
            prompt = wire.read_prompt_logprobs(chunk.input_logprobs, prompt_top)
        return Delta(token_ids, cached_tokens=self._cached_tokens, logprobs=positions, prompt_logprobs=prompt)

    def _complete(self, complete: Any) -> Delta:
        self.ended = True
        reason, stop_token, error = wire.read_finish(complete)
        handoff = b""
        if reason is FinishReason.LENGTH and self._is_prefill and self._last_token_id is not None:
            reason, handoff = FinishReason.HANDOFF, Handoff(self._last_token_id, wire.read_transfer(complete)).pack()
        if reason is FinishReason.STOP and stop_token is None:
            stop_token = self._last_token_id
        return Delta(
            finish_reason=reason,
            usage=Usage(len(self._request.token_ids), self._completion_tokens, self._cached_tokens),
            stop_token_id=stop_token,
            error=error,
            handoff=handoff,
        )

    @property
    def may_refuse_constraint(self) -> bool:
        """Whether a failure may be the constraint's: there is one, no token has come, and no prefill worker had it."""
        part = self._request.disaggregation
        is_decode = part is not None and part.role is Role.DECODE
        return self._request.guided is not None and not self._begun and not is_decode

    @property
    def _is_prefill(self) -> bool:
        disaggregation = self._request.disaggregation
        return disaggregation is not None and disaggregation.role is Role.PREFILL
