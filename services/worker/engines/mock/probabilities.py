"""Log-probabilities of tokens that were never computed: made up, but the same every time, and they add up.

The chosen token is always the most likely one. The others share what it leaves, each a quarter less than the one
before, so that any number of alternatives sums to less than 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from services.worker.contract.generation import PositionLogprobs, TokenLogprob

_STEP = 0.75


def logprobs_at(token_id: int, position: int, alternatives: int, vocab_size: int) -> PositionLogprobs:
    """Of one token in its place.

    Args:
        position: index in prompt and answer together.
        alternatives: how many of the most likely tokens to list, the chosen one included; 0: none.
    """
    number = xxh3_64_intdigest(token_id.to_bytes(4, "little") + position.to_bytes(8, "little"))
    left = 0.02 + 0.48 * (number / 2**64)
    chosen = TokenLogprob(token_id, math.log1p(-left), 1)
    if not alternatives:
        return PositionLogprobs(chosen)
    top = [chosen]
    share, other = left * (1 - _STEP), number % vocab_size
    for rank in range(2, min(alternatives, vocab_size) + 1):
        if other == token_id:
            other = (other + 1) % vocab_size
        top.append(TokenLogprob(other, math.log(share) if share > 0 else -math.inf, rank))
        share *= _STEP
        other = (other + 1) % vocab_size
    return PositionLogprobs(chosen, tuple(top))


def prompt_logprobs(token_ids: Sequence[int], alternatives: int, vocab_size: int) -> list[PositionLogprobs]:
    """One entry per prompt token; the first has rank 0 and logprob 0, because nothing comes before it."""
    first = PositionLogprobs(TokenLogprob(token_ids[0], 0.0, 0))
    return [
        first,
        *(logprobs_at(token_ids[index], index, alternatives, vocab_size) for index in range(1, len(token_ids))),
    ]
