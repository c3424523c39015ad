"""Options of local processing; a module without heavy imports, because the settings use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Level = Literal["none", "prompts", "full"]


@dataclass(frozen=True, slots=True)
class PromptBounds:
    """Resource limits of tokenization.

    Attributes:
        max_prompt_bytes: size of one prompt as received.
        max_held_bytes: total size of all prompts being tokenized, without those whose callers have cancelled, of which
            each thread may still process one.
        threads: prompts tokenized concurrently.
        max_waiting: prompts that may wait for a thread.
        limit_s: seconds from the arrival of a prompt to its token ids.
    """

    max_prompt_bytes: int = 4 << 20
    max_held_bytes: int = 64 << 20
    threads: int = 2
    max_waiting: int = 1024
    limit_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ProcessingOptions:
    """What the worker processes locally.

    Attributes:
        level: nothing, prompts, or prompts and output text.
        required: fail to start when the tokenizer cannot be loaded; otherwise the worker then serves token ids only.
        cache_bytes: memory for the token ids of earlier prompts.
        bounds: resource limits of tokenization.
    """

    level: Level = "prompts"
    required: bool = False
    cache_bytes: int = 16 << 20
    bounds: PromptBounds = field(default_factory=PromptBounds)
