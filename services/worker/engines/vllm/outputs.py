"""What vLLM says of a request, told to its sink. Pure: reads attributes, imports nothing of vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.errors import ErrorKind, SluiceError
from services.worker.contract.engine import Sink
from services.worker.contract.generation import (
    FinishReason,
    PositionLogprobs,
    StructuredOutput,
    TokenLogprob,
    Usage,
)
from services.worker.engines.shared.grammar_compiler import naming_constraint
from services.worker.engines.vllm.handoff import Handoff

LOWEST_LOGPROB = -9999.0


class RequestState:
    """One request under way, from vLLM's outputs to its sink.

    Args:
        prompt_tokens: length of the caller's prompt.
        top: log-probabilities per position besides the chosen one; None: none were asked for.
        prompt_top: the same for the prompt.
        hands_over: this is the prefill side.
        guided: the constraint on its output, if any.

    Attributes:
        ended: the sink has heard its last; what vLLM says after that is dropped.
    """

    def __init__(
        self,
        prompt_tokens: int,
        sink: Sink,
        top: int | None,
        prompt_top: int | None,
        *,
        hands_over: bool = False,
        guided: StructuredOutput | None = None,
    ) -> None:
        self.ended = False
        self.begun = False
        self.prompt_tokens = prompt_tokens
        self._sink = sink
        self._top = top
        self._prompt_top = prompt_top
        self._hands_over = hands_over
        self._guided = guided
        self._tokens = 0
        self._cached = 0
        self._last: int | None = None

    def take(self, output: Any) -> None:
        """One RequestOutput with the tokens of one step or more."""
        if self.ended:
            return
        completion = output.outputs[0]
        self._begin(output)
        token_ids: Sequence[int] = completion.token_ids
        if token_ids:
            self._tokens += len(token_ids)
            self._last = token_ids[-1]
            self._sink.push(token_ids, self._logprobs(token_ids, completion.logprobs))
        if output.finished:
            self._finish(completion, output.kv_transfer_params)

    def end(self, reason: FinishReason, error: SluiceError | None = None) -> None:
        """Ends the request unless it has ended."""
        if not self.ended:
            self.ended = True
            cause = None if error is None else naming_constraint(error, self._guided)
            self._sink.finish(reason, self._usage(), error=cause)

    def _begin(self, output: Any) -> None:
        if self.begun:
            return
        self.begun = True
        self._cached = min(output.num_cached_tokens or 0, self.prompt_tokens)
        positions: list[PositionLogprobs] = []
        if self._prompt_top is not None and output.prompt_logprobs:
            ids = output.prompt_token_ids or ()
            pairs = zip(ids, output.prompt_logprobs, strict=False)
            positions = [position(token_id, found or {}, self._prompt_top) for token_id, found in pairs]
        self._sink.begin(self._cached, positions)

    def _logprobs(self, token_ids: Sequence[int], found: Any) -> list[PositionLogprobs]:
        if self._top is None or not found:
            return []
        return [position(token_id, at, self._top) for token_id, at in zip(token_ids, found, strict=True)]

    def _finish(self, completion: Any, transfer: Mapping[str, Any] | None) -> None:
        self.ended = True
        reason, stop_token, error = self._reason(completion)
        handoff = b""
        if self._hands_over and reason is FinishReason.LENGTH and self._last is not None:
            reason, handoff = FinishReason.HANDOFF, Handoff(self._last, transfer or {}).pack()
        self._sink.finish(reason, self._usage(), stop_token_id=stop_token, error=error, handoff=handoff)

    def _reason(self, completion: Any) -> tuple[FinishReason, int | None, SluiceError | None]:
        if completion.finish_reason == "length":
            return FinishReason.LENGTH, None, None
        if completion.finish_reason == "abort":
            return FinishReason.CANCELLED, None, None
        if completion.finish_reason in ("stop", "repetition"):
            stopped_by = completion.stop_reason
            return FinishReason.STOP, stopped_by if isinstance(stopped_by, int) else self._last, None
        return FinishReason.ERROR, None, SluiceError(ErrorKind.INTERNAL, "The engine failed on this request.")

    def _usage(self) -> Usage:
        return Usage(self.prompt_tokens, self._tokens, self._cached)


def position(token_id: int, found: Mapping[int, Any], top: int) -> PositionLogprobs:
    """One position of vLLM's: log-probabilities by token id, of the chosen one and the likeliest."""
    ranked = sorted(found.items(), key=lambda item: item[1].rank or math.inf)
    return PositionLogprobs(
        _logprob(token_id, found.get(token_id)), tuple(_logprob(other, entry) for other, entry in ranked[:top])
    )


def _logprob(token_id: int, entry: Any) -> TokenLogprob:
    if entry is None:
        return TokenLogprob(token_id, 0.0)  # the first token of a prompt, before which there is nothing
    return TokenLogprob(token_id, max(entry.logprob, LOWEST_LOGPROB), entry.rank or 0)
