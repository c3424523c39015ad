"""When a rank is busy: the loads from which on it takes no more requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from services.router.reservations.cost import Limits
from services.router.scheduling.prompts import NOMINAL_BLOCK
from services.router.workers.worker import Worker, WorkerRank

CLOSED = Limits(0, 0, 0)  # nothing goes below it: whoever has these limits takes nothing


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Busy thresholds of a rank; 0 switches one off. A rank at or over any of them is busy.

    `kv_share`: share of its KV blocks, booked or in use as last reported. `prefill_tokens`: prompt tokens booked and
    not computed yet. `requests`: requests booked.
    """

    kv_share: float = 0.0
    prefill_tokens: int = 0
    requests: int = 0

    def __bool__(self) -> bool:
        return bool(self.kv_share or self.prefill_tokens or self.requests)

    def limits(self, worker: Worker, slot: WorkerRank, used_blocks: Mapping[WorkerRank, int]) -> Limits | None:
        """Booked loads from which on a rank takes nothing more; None for none."""
        if not self:
            return None
        most_blocks = self.kv_share * worker.total_blocks or math.inf
        if used_blocks.get(slot, 0) >= most_blocks:
            return CLOSED
        block = worker.block_size or NOMINAL_BLOCK
        return Limits(self.prefill_tokens / block or math.inf, most_blocks, self.requests or math.inf)
