"""How much a tokenizer may do to be fast; none of it changes an id."""

from __future__ import annotations

from dataclasses import dataclass

CACHE_OFF = "the cache is off"


@dataclass(frozen=True)
class EncoderOptions:
    """Ways to be faster.

    Attributes:
        fast_backend: use a faster library where it is installed and a self-check proves equal ids.
        cache_bytes: memory, for each model, in which ids of prompts' segments are remembered; 0 for none.
    """

    fast_backend: bool = True
    cache_bytes: int = 64 << 20
