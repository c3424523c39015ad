"""Computes embeddings by pooling the hidden states of the last layer."""

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
    max_tokens: int,
    adapters: Adapters,
    lora: str,
) -> list[bytes]:
    """Returns embeddings of token sequences.

    Args:
        model: A causal language model; runs its regular forward pass, not the paged one.
        inputs: Token ids, one array per vector.
        pooling: "last", "mean" or "cls".
        normalise: Whether vectors are normalised to length one after truncation.
        dimensions: Size of the returned vectors; 0 for the full size.
        max_tokens: Maximum number of tokens per forward pass; a longer input gets its own pass.
        adapters: LoRA adapters of the model.
        lora: Name of the adapter; empty if none.

    Returns:
        Vectors packed as little-endian float32, in input order.
    """
    vectors: list[bytes] = [b""] * len(inputs)
    try:
        with torch.no_grad():
            for indices in _batches(inputs, max_tokens):
                # Inputs of equal length need no padding, so a vector never depends on the others in its batch.
                ids = torch.tensor([list(inputs[index]) for index in indices], dtype=torch.long, device=model.device)
                adapters.select([(lora, ids.shape[1])])
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.float()
                pooled = _pool(hidden, pooling)[:, : dimensions or None]
                if normalise:
                    pooled = torch.nn.functional.normalize(pooled, dim=-1)
                for index, vector in zip(indices, pooled.cpu(), strict=True):
                    vectors[index] = array("f", vector.tolist()).tobytes()
    finally:
        adapters.select(())
    return vectors


def _pool(hidden: torch.Tensor, pooling: str) -> torch.Tensor:
    """Pools hidden states [inputs, positions, width] into [inputs, width]."""
    if pooling == "mean":
        return hidden.mean(dim=1)
    return hidden[:, 0 if pooling == "cls" else -1]


def _batches(inputs: Sequence[array[int]], max_tokens: int) -> list[list[int]]:
    """Groups input indices into batches of equal length."""
    batches: list[list[int]] = []
    for index in sorted(range(len(inputs)), key=lambda index: len(inputs[index])):
        length = len(inputs[index])
        last = batches[-1] if batches else []
        if last and len(inputs[last[0]]) == length and (len(last) + 1) * length <= max_tokens:
            last.append(index)
        else:
            batches.append([index])
    return batches
