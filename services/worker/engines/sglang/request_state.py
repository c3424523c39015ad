"""One request inside SGLang: what the engine says becomes what the sink hears. Pure: knows no SGLang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.common.errors import ErrorKind, SluiceError, internal, invalid, overloaded
from services.worker.contract.engine import Sink
from services.worker.contract.generation import (
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    TokenLogprob,
    Usage,
)
from services.worker.engines.sglang.sampling import stop_ids
from services.worker.engines.shared.grammar_compiler import naming_constraint

LOWEST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have."""

Chunk = Mapping[str, Any]
"""One item of SGLang's stream: `output_ids` since the last one, and `meta_info`."""


class RequestState:
    """Follows one request from its first token to its end.

    Args:
        request: as it was submitted.
        rid: the engine's name of the request.
        handoff: what a request ends with in place of its own reason, where this worker only runs prompts; None: it
            generates the whole answer.
        skip: tokens at the beginning that an earlier worker has told already.

    Attributes:
        ended: the sink has heard the end; whatever the engine still says is not for anyone.
    """

    def __init__(self, request: GenerateRequest, rid: str, sink: Sink, handoff: bytes | None = None, skip: int = 0):
        self.request = request
        self.rid = rid
        self.ended = False
        self._sink = sink
        self._handoff = handoff
        self._skip = skip
        self._stops = stop_ids(request.stop)
        # SGLang's ignore_eos means every stop id, so those that still count are watched here.
        self._watched = self._stops if request.stop.ignore_eos else frozenset()
        self._seen = 0
        self._told = 0
        self._cached: int | None = None

    def take(self, chunk: Chunk) -> None:
        """The next tokens, and the end if this is the last chunk."""
        if self.ended:
            return
        meta = chunk["meta_info"]
        finish = meta.get("finish_reason")
        if finish is not None and finish.get("type") == "abort":
            self.end(FinishReason.ERROR, error=abort_error(finish))  # its tokens may be some that were told before
            return
        token_ids, first = self._fresh(chunk["output_ids"], int(meta.get("completion_tokens") or 0))
        stop_at = self._stop_within(token_ids)
        if stop_at is not None:
            token_ids = token_ids[: stop_at + 1]
        if token_ids:
            self._begin(meta)
            self._told += len(token_ids)
            self._sink.push(token_ids, self._logprobs(meta, first, len(token_ids)))
        if stop_at is not None:
            self.end(FinishReason.STOP, stop_token_id=token_ids[-1])
        elif finish is not None:
            self._finish(finish, token_ids)

    def end(
        self,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: SluiceError | None = None,
        handoff: bytes = b"",
    ) -> None:
        """Tells the sink the end, once."""
        if not self.ended:
            self.ended = True
            usage = Usage(len(self.request.token_ids), self._told, self._cached or 0)
            cause = None if error is None else naming_constraint(error, self.request.guided)
            self._sink.finish(reason, usage, stop_token_id=stop_token_id, error=cause, handoff=handoff)

    def _fresh(self, output_ids: Sequence[int], completed: int) -> tuple[list[int], int]:
        """Tokens not told yet, and where they begin in the chunk."""
        count = max(completed - self._seen, 0)
        self._seen = max(completed, self._seen)
        skipped = min(self._skip, count)
        self._skip -= skipped
        first = max(len(output_ids) - count, 0) + skipped
        return list(output_ids[first:]) if count else [], first

    def _stop_within(self, token_ids: Sequence[int]) -> int | None:
        """Where SGLang should have stopped; None: nowhere."""
        if not self._watched:
            return None
        earliest = max(self.request.stop.min_tokens - self._told, 0)
        return next((i for i, one in enumerate(token_ids) if i >= earliest and one in self._watched), None)

    def _begin(self, meta: Mapping[str, Any]) -> None:
        if self._cached is None:
            self._cached = int(meta.get("cached_tokens") or 0)
            wanted = self.request.prompt_logprobs
            given = meta.get("input_token_logprobs") if wanted is not None else None
            self._sink.begin(self._cached, positions(given or (), meta.get("input_top_logprobs") or (), wanted or 0))

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
    """SGLang's log-probabilities in ours.

    Args:
        chosen: log-probability and id of each token; None for a prompt's first token, before which there is nothing.
        top: the likeliest first, in the same order as `chosen`; may be shorter.
        alternatives: how many of them are wanted.
    """
    found = []
    for index, (logprob, token_id, *_) in enumerate(chosen):
        best = top[index] if index < len(top) else None
        ranks = {one_id: rank for rank, (_, one_id, *_) in enumerate(best or (), 1)}
        likeliest = tuple(
            TokenLogprob(one_id, max(one_logprob, LOWEST_LOGPROB), rank)
            for rank, (one_logprob, one_id, *_) in enumerate(best or (), 1)
        )
        value = 0.0 if logprob is None else max(logprob, LOWEST_LOGPROB)
        found.append(PositionLogprobs(TokenLogprob(token_id, value, ranks.get(token_id, 0)), likeliest[:alternatives]))
    return found


def abort_error(finish: Mapping[str, Any]) -> SluiceError:
    """Why SGLang gave a request up."""
    message = first_line(str(finish.get("message") or "no reason given"))
    status = int(finish.get("status_code") or 0)
    if status == 400:
        return invalid(f"SGLang refused the request: {message}")
    if status in (429, 503):
        return overloaded(f"SGLang shed the request: {message}")
    if status:
        return internal(f"SGLang failed on the request: {message}")
    return SluiceError(ErrorKind.STREAM_INCOMPLETE, f"SGLang ended the request: {message}")


def first_line(message: str) -> str:
    """Enough of a message of SGLang's to act on: those about grammars repeat the grammar."""
    lines = message.strip().splitlines()
    return lines[0][:500] if lines else "no reason given"
