"""Mock log-probabilities: deterministic, with probabilities that sum to less than 1.

The chosen token is always the most likely one. The alternatives share the rest, each with three quarters of the
probability of the one before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from services.worker.contract.generation import PositionLogprobs, TokenLogprob

_DECAY = 0.75


def logprobs_at(token_id: int, position: int, alternatives: int, vocab_size: int) -> PositionLogprobs:
    """Returns the log-probabilities of one position.

    Args:
        position: Index in the prompt and output.
        alternatives: Number of most likely tokens to list, including the chosen one.
    """
    number = xxh3_64_intdigest(token_id.to_bytes(4, "little") + position.to_bytes(8, "little"))
    rest = 0.02 + 0.48 * (number / 2**64)
    chosen = TokenLogprob(token_id, math.log1p(-rest), 1)
    if not alternatives:
        return PositionLogprobs(chosen)
    top = [chosen]
    share, other = rest * (1 - _DECAY), number % vocab_size
    for rank in range(2, min(alternatives, vocab_size) + 1):
        if other == token_id:
            other = (other + 1) % vocab_size
        top.append(TokenLogprob(other, math.log(share) if share > 0 else -math.inf, rank))
        share *= _DECAY
        other = (other + 1) % vocab_size
    return PositionLogprobs(chosen, tuple(top))


def prompt_logprobs(token_ids: Sequence[int], alternatives: int, vocab_size: int) -> list[PositionLogprobs]:
    """Returns one entry per prompt token; the first has no log-probability and gets rank 0 and logprob 0."""
    first = PositionLogprobs(TokenLogprob(token_ids[0], 0.0, 0))
    return [
        first,
        *(logprobs_at(token_ids[index], index, alternatives, vocab_size) for index in range(1, len(token_ids))),
    ]
