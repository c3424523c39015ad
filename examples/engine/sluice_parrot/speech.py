"""What the parrot says: plain Python, no clock and no tasks, so that a unit test can call it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.engine import (
    FinishReason,
    GenerateRequest,
)


@dataclass(frozen=True)
class Speech:
    """A whole answer: its ids, why it ends, and the stop id that ended it, if one did."""

    token_ids: Sequence[int]
    reason: FinishReason
    stop_token_id: int | None = None


def speak(request: GenerateRequest, context_length: int, eos_token_ids: Sequence[int]) -> Speech:
    """The prompt again and again, until something ends it.

    Args:
        request: checked by the worker: ids are in the vocabulary, the prompt fits into the context.
        context_length: most tokens of prompt and answer.
        eos_token_ids: of the model, the usual one first.
    """
    stop = request.stop
    room = context_length - len(request.token_ids)
    limit = room if stop.max_tokens is None else min(stop.max_tokens, room)
    # A request that another worker began goes on where that one stopped.
    said = request.resumed_tokens
    prompt = request.token_ids[: len(request.token_ids) - said]
    words = [prompt[(said + index) % len(prompt)] for index in range(limit)]

    enders = stop.stop_token_ids
    if stop.ignore_eos:
        enders = enders.difference(stop.eos_token_ids, eos_token_ids)
    for index in range(stop.min_tokens, limit):
        if words[index] in enders:
            return Speech(words[: index + 1], FinishReason.STOP, words[index])

    end = max(len(prompt) - said, stop.min_tokens, 0)
    if stop.ignore_eos or not eos_token_ids or end >= limit:
        return Speech(words, FinishReason.LENGTH)
    return Speech([*words[:end], eos_token_ids[0]], FinishReason.STOP, eos_token_ids[0])
