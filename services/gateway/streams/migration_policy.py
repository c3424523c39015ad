"""How far generations may move."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MigrationPolicy:
    """Which generations may move.

    Attributes:
        enabled: any at all.
        limit: moves of one generation.
        max_tokens: of prompt and generated tokens together, which the new worker may have to compute; 0 for no limit.
        wait_s: how long a generation waits for a worker that takes it.
    """

    enabled: bool = True
    limit: int = 3
    max_tokens: int = 0
    wait_s: float = 10.0
