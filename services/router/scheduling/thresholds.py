"""Busy thresholds: the loads at which a rank accepts no more requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from services.router.reservations.cost import Limits
from services.router.scheduling.prompts import NOMINAL_BLOCK
from services.router.workers.worker import Worker, WorkerRank

CLOSED = Limits(0, 0, 0)  # every load reaches these limits, so the rank accepts no requests


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Busy thresholds of a rank; a rank that reaches any of them is busy. 0 disables a threshold.

    Attributes:
        kv_share: share of its KV blocks, reserved or in use as last reported.
        prefill_tokens: prompt tokens reserved and not computed yet.
        requests: requests reserved.
    """

    kv_share: float = 0.0
    prefill_tokens: int = 0
    requests: int = 0

    def __bool__(self) -> bool:
        return bool(self.kv_share or self.prefill_tokens or self.requests)

    def limits(self, worker: Worker, slot: WorkerRank, used_blocks: Mapping[WorkerRank, int]) -> Limits | None:
        """Returns the reserved loads at which a rank accepts no more requests; None without thresholds."""
        if not self:
            return None
        most_blocks = self.kv_share * worker.total_blocks or math.inf
        if used_blocks.get(slot, 0) >= most_blocks:
            return CLOSED
        block = worker.block_size or NOMINAL_BLOCK
        return Limits(self.prefill_tokens / block or math.inf, most_blocks, self.requests or math.inf)
