"""One request in the batching thread, and the requests that failed there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.worker.contract.generation import PositionLogprobs
from services.worker.engines.transformers.sampler import TokenSampler


class BatchRequest:
    """One request as the step thread knows it.

    Args:
        chooser: picks its tokens.
        seed: of its block hashes.
        adapter: name of its LoRA adapter; empty: none.
        priority: lower ones leave the waiting line first.
    """

    def __init__(self, sampler: TokenSampler, seed: int, adapter: str, priority: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.adapter = adapter
        self.priority = priority
        self.cached = 0
        self.began = False
        self.token_id = 0
        self.logprobs: PositionLogprobs | None = None


class Failures:
    """Stands for the library's output router: tokens go another way, failures come from here."""

    def __init__(self) -> None:
        self.failed: list[tuple[str, str]] = []

    def deliver(self, output: Any) -> None:
        if output.error:
            self.failed.append((output.request_id, str(output.error)))

    def deliver_batch(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            self.deliver(output)

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        self.failed.append((state.request_id, str(error)))
