"""The parrot's model: plain Python without clock or tasks, so that a unit test can call it directly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.engine import (
    FinishReason,
    GenerateRequest,
)


@dataclass(frozen=True)
class Speech:
    """Holds a complete output: its ids, the finish reason, and the stop id that ended it, if any."""

    token_ids: Sequence[int]
    reason: FinishReason
    stop_token_id: int | None = None


def speak(request: GenerateRequest, context_length: int, eos_token_ids: Sequence[int]) -> Speech:
    """Returns the prompt, repeated until the output ends.

    Args:
        request: validated by the worker: ids are in the vocabulary, the prompt fits into the context.
        context_length: maximum number of tokens of prompt and output.
        eos_token_ids: the model's end-of-sequence ids, the preferred one first.
    """
    stop = request.stop
    room = context_length - len(request.token_ids)
    limit = room if stop.max_tokens is None else min(stop.max_tokens, room)
    # A migrated request continues where the previous worker stopped.
    resumed = request.resumed_tokens
    prompt = request.token_ids[: len(request.token_ids) - resumed]
    tokens = [prompt[(resumed + index) % len(prompt)] for index in range(limit)]

    stop_ids = stop.stop_token_ids
    if stop.ignore_eos:
        stop_ids = stop_ids.difference(stop.eos_token_ids, eos_token_ids)
    for index in range(stop.min_tokens, limit):
        if tokens[index] in stop_ids:
            return Speech(tokens[: index + 1], FinishReason.STOP, tokens[index])

    end = max(len(prompt) - resumed, stop.min_tokens, 0)
    if stop.ignore_eos or not eos_token_ids or end >= limit:
        return Speech(tokens, FinishReason.LENGTH)
    return Speech([*tokens[:end], eos_token_ids[0]], FinishReason.STOP, eos_token_ids[0])
