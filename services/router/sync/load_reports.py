"""Last load reports of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from services.router.sync.model_state import ModelState
from services.router.workers.worker import WorkerRank

UsedBlocks: TypeAlias = Callable[[bytes], Sequence[int]]
"""Parses a report as the transport encodes it; returns the KV blocks in use by rank."""


class Reports:
    """Provides the reported blocks in use; parses each report once."""

    def __init__(self, used_blocks: UsedBlocks) -> None:
        self._used_blocks = used_blocks
        self._read: dict[str, dict[str, tuple[bytes, dict[WorkerRank, int]]]] = {}

    def used_blocks(self, view: ModelState) -> Mapping[WorkerRank, int]:
        """Returns the KV blocks in use by rank, for ranks of a model that have reported."""
        before = self._read.get(view.model, {})
        now = {worker_id: self._of(worker_id, report, before) for worker_id, report in view.reports.items()}
        self._read[view.model] = now
        return {slot: used for _, ranks in now.values() for slot, used in ranks.items()}

    def _of(
        self, worker_id: str, report: bytes, before: Mapping[str, tuple[bytes, dict[WorkerRank, int]]]
    ) -> tuple[bytes, dict[WorkerRank, int]]:
        known = before.get(worker_id)
        if known is not None and known[0] == report:
            return known
        return report, {WorkerRank(worker_id, rank): used for rank, used in enumerate(self._used_blocks(report))}
