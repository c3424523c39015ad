"""OpenAI bodies as prompts, for external schedulers that route before tokenization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.common.errors import ErrorKind, SluiceError
from services.router.scheduling.queries import Prompt
from services.router.workers.worker import Worker


class Bodies(Protocol):
    """Tokenizes OpenAI bodies."""

    async def tokenized(self, model: str, prompt: Prompt, workers: Sequence[Worker]) -> Prompt:
        """Returns the prompt as token ids, with block hashes if the model's workers have blocks."""
        ...


class NoBodies:
    """Rejects OpenAI bodies; used without a preprocess service."""

    async def tokenized(self, model: str, prompt: Prompt, workers: Sequence[Worker]) -> Prompt:
        """Raises SluiceError (FAILED_PRECONDITION)."""
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            "This router has no preprocess service to tokenize openai_body; set --preprocess, or send token_ids or "
            "block_hashes.",
            param="prompt.openai_body",
            code="no_preprocess",
        )
