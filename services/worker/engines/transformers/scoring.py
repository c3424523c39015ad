"""Computes the log-probabilities of a prompt in one regular forward pass, outside the paged cache."""

from __future__ import annotations

from array import array
from typing import Any

import torch

from services.common.base.errors import invalid
from services.worker.contract.generation import PositionLogprobs
from services.worker.engines.transformers.lora import Adapters
from services.worker.engines.transformers.sampler import position_logprobs

MAX_LOGITS = 1 << 28
"""Logits (positions times vocabulary) of one pass, 1 GiB; `prompt_logprobs` of more: INVALID_ARGUMENT."""


def score_prompt(
    model: Any, token_ids: array[int], alternatives: int, adapters: Adapters, lora: str
) -> list[PositionLogprobs]:
    """Returns one entry per token, except for the first, which has no log-probability.

    Raises:
        SluiceError: INVALID_ARGUMENT when the prompt has too many logits.
    """
    if len(token_ids) * int(model.config.get_text_config().vocab_size) > MAX_LOGITS:
        raise invalid(
            "The prompt is too long for prompt_logprobs on this engine; shorten it or omit prompt_logprobs.",
            param="prompt_logprobs",
        )
    if len(token_ids) < 2:
        return []
    ids = torch.tensor([token_ids.tolist()], dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            adapters.select([(lora, ids.shape[1])])
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0]
            rows = torch.log_softmax(logits.float(), dim=-1).cpu()
    finally:
        adapters.select(())
    return [position_logprobs(row, token_id, alternatives) for row, token_id in zip(rows, token_ids[1:], strict=True)]
