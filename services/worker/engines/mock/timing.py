"""How long an engine step would take on a real accelerator."""

from __future__ import annotations

from abc import ABC, abstractmethod


class StepTiming(ABC):
    """A model of step durations."""

    @abstractmethod
    def step_s(self, prefill_tokens: int, decoding: int, cache_use: float) -> float:
        """Seconds of one step.

        Args:
            prefill_tokens: prompt tokens computed in the step, over all sequences.
            decoding: sequences that compute one token each.
            cache_use: share of KV-cache blocks held by sequences, 0 to 1.
        """


class ModelledTiming(StepTiming):
    """Polynomials fitted to a GPU: quadratic in the prefilled tokens, and in the cache use while decoding."""

    def __init__(self, speedup: float = 1.0) -> None:
        self._scale = 1e-3 / speedup

    def step_s(self, prefill_tokens: int, decoding: int, cache_use: float) -> float:
        milliseconds = 0.0
        if prefill_tokens:
            milliseconds += prefill_ms(prefill_tokens)
        if decoding:
            milliseconds += decode_ms(cache_use)
        return milliseconds * self._scale


class FixedTiming(StepTiming):
    """The same duration for every step, plus a constant per prompt token."""

    def __init__(self, step_ms: float, prefill_us: float, speedup: float = 1.0) -> None:
        self._step_s = step_ms * 1e-3 / speedup
        self._prefill_s = prefill_us * 1e-6 / speedup

    def step_s(self, prefill_tokens: int, decoding: int, cache_use: float) -> float:
        return self._step_s + prefill_tokens * self._prefill_s


def prefill_ms(tokens: int) -> float:
    """Milliseconds to compute this many prompt tokens in one batch."""
    return 4.209989e-7 * tokens * tokens + 1.518344e-2 * tokens + 16.50142


def decode_ms(cache_use: float) -> float:
    """Milliseconds to compute one token for each running sequence; the batch hardly matters, its cache does."""
    return max(1.0, -25.74 * cache_use * cache_use + 54.01 * cache_use + 5.74)
