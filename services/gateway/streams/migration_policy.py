"""Limits of migration, in a module of their own so that the settings import neither gRPC nor the streams."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MigrationPolicy:
    """Which generations may migrate.

    Attributes:
        enabled: whether generations migrate at all.
        limit: maximum number of migrations of one generation.
        max_tokens: maximum number of prompt and generated tokens, because the new worker may have to prefill all of
            them; 0 for no limit.
        wait_s: how long a generation waits for a new worker, seconds.
    """

    enabled: bool = True
    limit: int = 3
    max_tokens: int = 0
    wait_s: float = 10.0
