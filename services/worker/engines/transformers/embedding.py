"""Embeddings: hidden states of the last layer, pooled; needs torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from services.worker.engines.transformers.lora import Adapters


def embed(
    model: Any,
    inputs: Sequence[array[int]],
    pooling: str,
    normalise: bool,
    dimensions: int,
    most_tokens: int,
    adapters: Adapters,
    lora: str,
) -> list[bytes]:
    """Vectors of token sequences.

    Args:
        model: a causal language model; its own forward pass is used, not the paged one.
        inputs: token ids, one array per vector.
        pooling: "last", "mean" or "cls".
        normalise: whether a vector gets length one, after it was cut.
        dimensions: numbers a vector keeps; 0: all.
        most_tokens: most tokens of one pass; a longer input has a pass of its own.
        adapters: of the model.
        lora: name of the adapter to go through; empty: none.

    Returns:
        Little-endian float32 back to back, in the order of the inputs.
    """
    vectors: list[bytes] = [b""] * len(inputs)
    try:
        with torch.no_grad():
            for places in _passes(inputs, most_tokens):
                # Inputs of one length need no padding, so that a vector never depends on its neighbours.
                ids = torch.tensor([list(inputs[place]) for place in places], dtype=torch.long, device=model.device)
                adapters.select([(lora, ids.shape[1])])
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.float()
                pooled = _pool(hidden, pooling)[:, : dimensions or None]
                if normalise:
                    pooled = torch.nn.functional.normalize(pooled, dim=-1)
                for place, vector in zip(places, pooled.cpu(), strict=True):
                    vectors[place] = array("f", vector.tolist()).tobytes()
    finally:
        adapters.select(())
    return vectors


def _pool(hidden: torch.Tensor, pooling: str) -> torch.Tensor:
    """[inputs, positions, width] to [inputs, width]."""
    if pooling == "mean":
        return hidden.mean(dim=1)
    return hidden[:, 0 if pooling == "cls" else -1]


def _passes(inputs: Sequence[array[int]], most_tokens: int) -> list[list[int]]:
    """Places of inputs that are computed together."""
    passes: list[list[int]] = []
    for place in sorted(range(len(inputs)), key=lambda place: len(inputs[place])):
        length = len(inputs[place])
        last = passes[-1] if passes else []
        if last and len(inputs[last[0]]) == length and (len(last) + 1) * length <= most_tokens:
            last.append(place)
        else:
            passes.append([place])
    return passes
