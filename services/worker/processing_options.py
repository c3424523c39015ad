"""What a worker is told to do beside its engine; light, because settings are made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Level = Literal["none", "prompts", "full"]


@dataclass(frozen=True, slots=True)
class PromptBounds:
    """What prompts may use up.

    Attributes:
        max_prompt_bytes: of one prompt, as it comes.
        max_held_bytes: of all that wait for their ids; what a thread is still at after its caller has left is not
            counted, which is at most one prompt a thread.
        threads: prompts that are computed at once.
        max_waiting: prompts that wait for a thread.
        limit_s: seconds from a prompt's arrival to its ids.
    """

    max_prompt_bytes: int = 4 << 20
    max_held_bytes: int = 64 << 20
    threads: int = 2
    max_waiting: int = 1024
    limit_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ProcessingOptions:
    """What is done here.

    Attributes:
        level: nothing; prompts; prompts and texts.
        required: the worker cannot do without; otherwise it serves token ids when the tokenizer cannot be loaded.
        cache_bytes: memory for ids of earlier prompts.
    """

    level: Level = "prompts"
    required: bool = False
    cache_bytes: int = 16 << 20
    bounds: PromptBounds = field(default_factory=PromptBounds)
