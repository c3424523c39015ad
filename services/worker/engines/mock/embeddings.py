"""Mock embeddings: unit vectors determined by the tokens and the adapter."""

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


def _vector(token_ids: array[int], width: int, dimensions: int, seed: int) -> bytes:
    gauss = Random(xxh3_64_intdigest(pack_u32(token_ids), seed)).gauss
    values = [gauss(0, 1) for _ in range(width)][:dimensions]
    length = math.sqrt(sum(value * value for value in values)) or 1.0
    packed = array("f", (value / length for value in values))
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
