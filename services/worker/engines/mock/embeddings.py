"""Mock embeddings and classes: unit vectors and probabilities determined by the tokens and the adapter."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from random import Random

from xxhash import xxh3_64_intdigest

from services.common.errors import invalid
from services.common.hashing import seed_for
from services.common.packing import pack_u32
from services.worker.contract.engine import Embedded


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
