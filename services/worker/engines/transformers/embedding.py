"""Computes embeddings by pooling the hidden states of the last layer, and classes by the model's own head."""

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
            for indices in batches(inputs, max_tokens):
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


def classify(model: Any, inputs: Sequence[array[int]], second_text_at: Sequence[int], max_tokens: int) -> list[bytes]:
    """Returns the probabilities of the classes for token sequences, packed as little-endian float32, in input order.

    Args:
        model: A model for sequence classification. With one label, or several that do not exclude each other, each
            probability is the logistic function of its logit; else they are the softmax.
        second_text_at: Per input, index of the first token of the second of two texts; 0 for one text.
        max_tokens: Maximum number of tokens per forward pass; a longer input gets its own pass.
    """
    found: list[bytes] = [b""] * len(inputs)
    config = model.config
    config.pad_token_id = -1  # nothing is padded; without an id, decoders refuse batches
    apart = config.num_labels == 1 or config.problem_type == "multi_label_classification"
    with torch.no_grad():
        for indices in batches(inputs, max_tokens):
            ids = torch.tensor([list(inputs[index]) for index in indices], dtype=torch.long, device=model.device)
            types = {}
            if getattr(config, "type_vocab_size", 1) > 1:
                positions = torch.arange(ids.shape[1])
                starts = torch.tensor([second_text_at[index] or ids.shape[1] for index in indices])
                types["token_type_ids"] = (positions[None] >= starts[:, None]).long().to(model.device)
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **types).logits.float()
            probabilities = logits.sigmoid() if apart else logits.softmax(dim=-1)
            for index, row in zip(indices, probabilities.cpu(), strict=True):
                found[index] = array("f", row.tolist()).tobytes()
    return found


def _pool(hidden: torch.Tensor, pooling: str) -> torch.Tensor:
    """Pools hidden states [inputs, positions, width] into [inputs, width]."""
    if pooling == "mean":
        return hidden.mean(dim=1)
    return hidden[:, 0 if pooling == "cls" else -1]


def batches(inputs: Sequence[array[int]], max_tokens: int) -> list[list[int]]:
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
