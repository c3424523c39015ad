"""OpenAI bodies as prompts: what an external scheduler has at hand before anybody tokenized it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.common.errors import ErrorKind, SluiceError
from services.router.scheduling.queries import Prompt
from services.router.workers.worker import Worker


class Bodies(Protocol):
    """Turns bodies into tokens."""

    async def tokenized(self, model: str, prompt: Prompt, workers: Sequence[Worker]) -> Prompt:
        """Returns the prompt by its token ids, with their hashes where the model's workers have blocks."""
        ...


class NoBodies:
    """What a router does that knows no preprocess service."""

    async def tokenized(self, model: str, prompt: Prompt, workers: Sequence[Worker]) -> Prompt:
        """Refuses."""
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            "This router knows no preprocess service (--preprocess), so it cannot read openai_body; send token_ids or "
            "block_hashes.",
            param="prompt.openai_body",
            code="no_preprocess",
        )
