"""Converts SGLang's chunks of a request into calls of its sink, without importing SGLang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, internal, invalid, overloaded
from services.worker.contract.engine import Sink
from services.worker.contract.generation import (
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    TokenLogprob,
)
from services.worker.engines.inprocess.request_state import LOWEST_LOGPROB, InflightState
from services.worker.engines.inprocess.sampling import stop_ids
from services.worker.engines.shared.media_prompts import check_length

Chunk = Mapping[str, Any]
"""One item of SGLang's stream: the new `output_ids`, and `meta_info`."""


class RequestState(InflightState):
    """State of one request in flight.

    Args:
        rid: Engine request id.
        handoff: The handoff with which the request ends on a prefill worker; None on other workers.
        skip: Number of leading tokens that the prefill worker has already returned.
    """

    def __init__(self, request: GenerateRequest, rid: str, sink: Sink, handoff: bytes | None = None, skip: int = 0):
        super().__init__(len(request.token_ids), sink, request.guided)
        self.request = request
        self.rid = rid
        self._handoff = handoff
        self._skip = skip
        self._stops = stop_ids(request.stop)
        # SGLang's ignore_eos disables every stop id, so the remaining ones are checked here.
        self._checked_stops = self._stops if request.stop.ignore_eos else frozenset()
        self._received = 0

    def take(self, chunk: Chunk) -> None:
        """Processes one chunk; pushes its tokens and finishes the sink if it is the last one."""
        if self.ended:
            return
        meta = chunk["meta_info"]
        finish = meta.get("finish_reason")
        if finish is not None and finish.get("type") == "abort":
            self.end(FinishReason.ERROR, error=abort_error(finish))  # its tokens may repeat earlier ones
            return
        token_ids, first = self._new_tokens(chunk["output_ids"], int(meta.get("completion_tokens") or 0))
        stop_at = self._find_stop(token_ids)
        if stop_at is not None:
            token_ids = token_ids[: stop_at + 1]
        if token_ids:
            if self._cached_tokens is None:
                self._begin(meta)
            self._completion_tokens += len(token_ids)
            self._sink.push(token_ids, self._logprobs(meta, first, len(token_ids)))
        if stop_at is not None:
            self.end(FinishReason.STOP, stop_token_id=token_ids[-1])
        elif finish is not None:
            self._finish(finish, token_ids)

    def _new_tokens(self, output_ids: Sequence[int], completed: int) -> tuple[list[int], int]:
        """Returns the chunk's tokens that were not pushed yet, and their offset in the chunk."""
        count = max(completed - self._received, 0)
        self._received = max(completed, self._received)
        skipped = min(self._skip, count)
        self._skip -= skipped
        first = max(len(output_ids) - count, 0) + skipped
        return list(output_ids[first:]) if count else [], first

    def _find_stop(self, token_ids: Sequence[int]) -> int | None:
        """Returns the index of the first token that ends the request; None if there is none."""
        if not self._checked_stops:
            return None
        earliest = max(self.request.stop.min_tokens - self._completion_tokens, 0)
        return next(
            (i for i, token_id in enumerate(token_ids) if i >= earliest and token_id in self._checked_stops), None
        )

    def _begin(self, meta: Mapping[str, Any]) -> None:
        if self.request.media:
            check_length(int(meta.get("prompt_tokens") or 0), len(self.request.token_ids))
        self._cached_tokens = int(meta.get("cached_tokens") or 0)
        count = self.request.prompt_logprobs
        chosen = meta.get("input_token_logprobs") if count is not None else None
        self._sink.begin(self._cached_tokens, positions(chosen or (), meta.get("input_top_logprobs") or (), count or 0))

    def _logprobs(self, meta: Mapping[str, Any], first: int, count: int) -> list[PositionLogprobs]:
        if self.request.logprobs is None:
            return []
        chosen = meta.get("output_token_logprobs") or ()
        top = meta.get("output_top_logprobs") or ()
        return positions(chosen[first : first + count], top[first : first + count], self.request.logprobs)

    def _finish(self, finish: Mapping[str, Any], token_ids: Sequence[int]) -> None:
        kind, matched = finish.get("type"), finish.get("matched")
        last = token_ids[-1] if token_ids else None
        if kind == "stop" or last in self._stops:
            self.end(FinishReason.STOP, stop_token_id=matched if isinstance(matched, int) else last)
        elif self._handoff is not None and self.request.stop.max_tokens != 1:
            self.end(FinishReason.HANDOFF, handoff=self._handoff)
        else:
            self.end(FinishReason.LENGTH)


def positions(
    chosen: Sequence[tuple[float | None, int, Any]],
    top: Sequence[Sequence[tuple[float, int, Any]] | None],
    alternatives: int,
) -> list[PositionLogprobs]:
    """Converts SGLang's log-probabilities.

    Args:
        chosen: Log-probability and id of each token; the first token of a prompt has None.
        top: Most likely tokens of each position, sorted by descending probability; may be shorter than `chosen`.
        alternatives: Number of alternatives to return per position.
    """
    converted = []
    for index, (logprob, token_id, *_) in enumerate(chosen):
        best = top[index] if index < len(top) else None
        ranks = {top_id: rank for rank, (_, top_id, *_) in enumerate(best or (), 1)}
        likeliest = tuple(
            TokenLogprob(top_id, max(top_logprob, LOWEST_LOGPROB), rank)
            for rank, (top_logprob, top_id, *_) in enumerate(best or (), 1)
        )
        value = 0.0 if logprob is None else max(logprob, LOWEST_LOGPROB)
        converted.append(
            PositionLogprobs(TokenLogprob(token_id, value, ranks.get(token_id, 0)), likeliest[:alternatives])
        )
    return converted


def abort_error(finish: Mapping[str, Any]) -> SluiceError:
    """Returns the error of a request that SGLang aborted."""
    message = first_line(str(finish.get("message") or "no reason given"))
    status = int(finish.get("status_code") or 0)
    if status == 400:
        return invalid(f"SGLang rejected the request: {message}")
    if status in (429, 503):
        return overloaded(f"SGLang is overloaded; try again later: {message}")
    if status:
        return internal(f"SGLang failed on the request: {message}")
    return SluiceError(ErrorKind.STREAM_INCOMPLETE, f"SGLang ended the request: {message}")


def first_line(message: str) -> str:
    """Returns the first line of an SGLang message, at most 500 characters; grammar errors repeat the whole grammar."""
    lines = message.strip().splitlines()
    return lines[0][:500] if lines else "no reason given"
