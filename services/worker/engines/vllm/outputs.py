"""Forwards vLLM's outputs of a request to its sink, without importing vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError
from services.worker.contract.engine import Sink
from services.worker.contract.generation import (
    FinishReason,
    PositionLogprobs,
    StructuredOutput,
    TokenLogprob,
)
from services.worker.engines.inprocess.request_state import LOWEST_LOGPROB, InflightState
from services.worker.engines.shared.grammar_compiler import refused_constraint
from services.worker.engines.vllm.handoff import Handoff


class RequestState(InflightState):
    """State of one request in flight; converts vLLM's outputs into calls of its sink.

    Args:
        top: Alternatives per position in the log-probabilities; None: log-probabilities not requested.
        prompt_top: The same for the prompt.
        is_prefill: Whether the request ends with a handoff to a decode worker.
    """

    def __init__(
        self,
        prompt_tokens: int,
        sink: Sink,
        top: int | None,
        prompt_top: int | None,
        *,
        is_prefill: bool = False,
        guided: StructuredOutput | None = None,
    ) -> None:
        super().__init__(prompt_tokens, sink, guided)
        self._top = top
        self._prompt_top = prompt_top
        self._is_prefill = is_prefill
        self._last_token_id: int | None = None

    def take(self, output: Any) -> None:
        """Processes one RequestOutput, which holds the tokens of one or more steps."""
        if self.ended:
            return
        completion = output.outputs[0]
        if self._cached_tokens is None:
            self._begin(output)
        token_ids: Sequence[int] = completion.token_ids
        if token_ids:
            self._completion_tokens += len(token_ids)
            self._last_token_id = token_ids[-1]
            self._sink.push(token_ids, self._logprobs(token_ids, completion.logprobs))
        if output.finished:
            self._finish(completion, output.kv_transfer_params)

    def _begin(self, output: Any) -> None:
        self._cached_tokens = min(output.num_cached_tokens or 0, self.prompt_tokens)
        positions: list[PositionLogprobs] = []
        if self._prompt_top is not None and output.prompt_logprobs:
            ids = output.prompt_token_ids or ()
            pairs = zip(ids, output.prompt_logprobs, strict=False)
            positions = [position(token_id, entries or {}, self._prompt_top) for token_id, entries in pairs]
        self._sink.begin(self._cached_tokens, positions)

    def _logprobs(self, token_ids: Sequence[int], logprobs: Any) -> list[PositionLogprobs]:
        if self._top is None or not logprobs:
            return []
        return [position(token_id, entries, self._top) for token_id, entries in zip(token_ids, logprobs, strict=True)]

    def _finish(self, completion: Any, transfer: Mapping[str, Any] | None) -> None:
        reason, stop_token, error = self._reason(completion)
        handoff = b""
        if self._is_prefill and reason is FinishReason.LENGTH and self._last_token_id is not None:
            reason, handoff = FinishReason.HANDOFF, Handoff(self._last_token_id, transfer or {}).pack()
        self.end(reason, error, stop_token_id=stop_token, handoff=handoff)

    def _reason(self, completion: Any) -> tuple[FinishReason, int | None, SluiceError | None]:
        if completion.finish_reason == "length":
            return FinishReason.LENGTH, None, None
        if completion.finish_reason == "abort":
            return FinishReason.CANCELLED, None, None
        if completion.finish_reason in ("stop", "repetition"):
            stopped_by = completion.stop_reason
            return FinishReason.STOP, stopped_by if isinstance(stopped_by, int) else self._last_token_id, None
        if self._guided is not None and not self._completion_tokens:
            return FinishReason.ERROR, None, refused_constraint()
        return FinishReason.ERROR, None, SluiceError(ErrorKind.INTERNAL, "The engine failed on this request.")


def position(token_id: int, entries: Mapping[int, Any], top: int) -> PositionLogprobs:
    """Converts vLLM's log-probabilities of one position, by token id, of the chosen and the most likely tokens."""
    ranked = sorted(entries.items(), key=lambda item: item[1].rank or math.inf)
    return PositionLogprobs(
        _logprob(token_id, entries.get(token_id)), tuple(_logprob(other, entry) for other, entry in ranked[:top])
    )


def _logprob(token_id: int, entry: Any) -> TokenLogprob:
    if entry is None:
        return TokenLogprob(token_id, 0.0)  # the first token of a prompt has no log-probability
    return TokenLogprob(token_id, max(entry.logprob, LOWEST_LOGPROB), entry.rank or 0)
