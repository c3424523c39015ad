"""What the mock engine makes up beside tokens: log-probabilities, embeddings and classes, determined by the tokens."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from random import Random

from xxhash import xxh3_64_intdigest

from services.common.base.errors import invalid
from services.common.base.packing import pack_u32
from services.common.types.hashing import seed_for
from services.worker.contract.engine import Embedded
from services.worker.contract.generation import PositionLogprobs, TokenLogprob

_LN_2 = math.log(2)


def logprobs_at(token_id: int, alternatives: int, vocab_size: int) -> PositionLogprobs:
    """Returns the log-probabilities of one position: the chosen token has 1/2, the ids that follow it 1/4, 1/8, ...

    Args:
        alternatives: Number of most likely tokens to list, including the chosen one.
    """
    top = tuple(
        TokenLogprob((token_id + rank - 1) % vocab_size, -rank * _LN_2, rank)
        for rank in range(1, max(1, min(alternatives, vocab_size)) + 1)
    )
    return PositionLogprobs(top[0], top if alternatives else ())


def prompt_logprobs(token_ids: Sequence[int], alternatives: int, vocab_size: int) -> list[PositionLogprobs]:
    """Returns one entry per prompt token; the first has no log-probability and gets rank 0 and logprob 0."""
    first = PositionLogprobs(TokenLogprob(token_ids[0], 0.0, 0))
    return [first, *(logprobs_at(token_id, alternatives, vocab_size) for token_id in token_ids[1:])]


def embed(inputs: Sequence[array[int]], width: int, dimensions: int, lora: str) -> Embedded:
    """Returns unit vectors, truncated to `dimensions` and normalised; 0 keeps the full `width`.

    Raises:
        SluiceError: INVALID_ARGUMENT when `dimensions` exceeds `width`.
    """
    if dimensions > width:
        raise invalid(
            f"dimensions is {dimensions}; use at most {width}, the size of this model's embeddings.", param="dimensions"
        )
    seed = seed_for(lora)
    vectors = [_vector(token_ids, width, dimensions or width, seed) for token_ids in inputs]
    return Embedded(vectors, sum(map(len, inputs)))


def classify(inputs: Sequence[array[int]], second_text_at: Sequence[int], labels: int, lora: str) -> Embedded:
    """Returns probabilities of classes: those of one class are the share of the first text's tokens in the second text.

    Args:
        second_text_at: per input, index of the first token of the second of two texts; 0 for one text.
        labels: number of classes, at least one.
    """
    vectors = []
    for token_ids, second_at in zip(inputs, second_text_at, strict=True):
        if labels == 1 and second_at:
            first, second = set(token_ids[:second_at]), set(token_ids[second_at:])
            vectors.append(_packed([len(first & second) / len(first)]))
        else:
            scores = array("f", _vector(token_ids, labels + 1, labels, seed_for(lora)))
            vectors.append(_packed([score * score for score in scores]))
    return Embedded(vectors, sum(map(len, inputs)))


def _vector(token_ids: array[int], width: int, dimensions: int, seed: int) -> bytes:
    gauss = Random(xxh3_64_intdigest(pack_u32(token_ids), seed)).gauss
    values = [gauss(0, 1) for _ in range(width)][:dimensions]
    length = math.sqrt(sum(value * value for value in values)) or 1.0
    return _packed([value / length for value in values])


def _packed(values: Sequence[float]) -> bytes:
    packed = array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
