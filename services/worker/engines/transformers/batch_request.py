"""State of requests in the batching thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.worker.contract.generation import PositionLogprobs
from services.worker.engines.transformers.sampler import TokenSampler


@dataclass(frozen=True, slots=True)
class Pictures:
    """The encoded pictures of a prompt.

    Attributes:
        features: [tokens, hidden], in the order of `places`.
        places: Indices of the tokens that the features replace.
        grid: Patches of each picture [pictures, 3] as (time, height, width); None for models that need none.
    """

    features: torch.Tensor
    places: torch.Tensor
    grid: torch.Tensor | None


class BatchRequest:
    """State of one request; used by the batching thread only.

    Args:
        sampler: Samples the request's tokens.
        seed: Seed of the request's block hashes.
        adapter: Name of the LoRA adapter; empty if none.
        priority: Priority in the waiting queue; lower values run first.
        pictures: Encoded pictures of the prompt, if any.
    """

    def __init__(
        self, sampler: TokenSampler, seed: int, adapter: str, priority: int, pictures: Pictures | None = None
    ) -> None:
        self.sampler = sampler
        self.seed = seed
        self.adapter = adapter
        self.priority = priority
        self.pictures = pictures
        self.cached_tokens = 0
        self.begun = False
        self.token_id = 0
        self.logprobs: PositionLogprobs | None = None


class Failures:
    """Replaces the library's output router; collects failures only, because tokens are delivered per step."""

    def __init__(self) -> None:
        self.failed: list[tuple[str, Exception]] = []

    def deliver(self, output: Any) -> None:
        if output.error:
            self.failed.append((output.request_id, RuntimeError(str(output.error))))

    def deliver_batch(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            self.deliver(output)

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        self.failed.append((state.request_id, error))
