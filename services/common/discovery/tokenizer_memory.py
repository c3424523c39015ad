"""Memory of the tokenizers that were discovered from workers, estimated before they are loaded."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError, quoted
from services.common.packages.model_files import tokenizer_files

MEMORY_FACTOR = 5
"""Memory of a loaded tokenizer per byte of its files; that of the largest known ones."""
MIN_BYTES = 2 << 20
"""Bytes that any loaded tokenizer is estimated to take."""


class TokenizerMemory:
    """Reserves memory by model; models with the same key share a tokenizer, which counts once.

    Args:
        budget: limit for all of them, bytes.
        model_bytes: memory that each tokenizer may take beside its files, such as a cache.
    """

    def __init__(self, budget: Budget, model_bytes: int = 0) -> None:
        self._budget = budget
        self._model_bytes = model_bytes
        self._reserved: dict[str, tuple[Hashable, int]] = {}

    @property
    def used_bytes(self) -> int:
        """The memory reserved for all tokenizers."""
        return sum(dict(self._reserved.values()).values())

    def estimate(self, path: Path) -> int:
        """Returns the bytes that a tokenizer will take; reads the sizes of its files."""
        size = sum(file.stat().st_size for file in tokenizer_files(path))
        return MIN_BYTES + MEMORY_FACTOR * size + self._model_bytes

    def try_reserve(self, model: str, key: Hashable, size: int) -> bool:
        """Reserves memory for a model instead of what it has; returns False if that does not fit now."""
        others = dict(entry for name, entry in self._reserved.items() if name != model)
        if key not in others and sum(others.values()) + size > self._budget.limit:
            return False
        self._reserved[model] = key, size
        return True

    def fits(self, size: int) -> bool:
        """Whether a tokenizer fits if all others make room."""
        return size <= self._budget.limit

    def release(self, model: str) -> None:
        """Gives back the memory of a model; ignores one without any."""
        self._reserved.pop(model, None)

    def refuse(self, model: str, size: int) -> SluiceError:
        """Counts a refusal and returns its error."""
        return self._budget.refuse(
            f"The tokenizer of model {quoted(model)} takes about {size >> 20} MiB, too much beside the others",
            kind=ErrorKind.OVERLOADED,
            retry_after_ms=1_000,
        )
