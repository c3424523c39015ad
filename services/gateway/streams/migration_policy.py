"""Limits of migration, in a module of their own so that the settings import neither gRPC nor the streams."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOKENS = 131_072
"""Prompt and generated tokens of a generation that migrates; a longer one fails with its worker."""
MAX_MIGRATIONS = 3
"""Migrations of one generation; then it fails with its worker."""


@dataclass(frozen=True, slots=True)
class MigrationPolicy:
    """Which generations may migrate.

    Attributes:
        enabled: whether generations migrate at all.
        limit: maximum number of migrations of one generation; without output after deaths of its workers without a
            known cause, 1 at most (`suspects`).
        max_tokens: maximum number of prompt and generated tokens, because the new worker may have to prefill all of
            them; 0 for no limit.
        wait_s: how long a generation waits for a new worker, seconds.
    """

    enabled: bool = True
    limit: int = MAX_MIGRATIONS
    max_tokens: int = MAX_TOKENS
    wait_s: float = 10.0
