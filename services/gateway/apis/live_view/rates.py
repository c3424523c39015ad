"""Rates per second from running totals, with a history of two minutes."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass

from services.gateway.apis.live_view.request_history import Totals

HISTORY_SAMPLES = 120


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second; `live` is the current number of streams."""

    tokenized: float = 0.0
    decisions: float = 0.0
    requests: float = 0.0
    ended: float = 0.0
    failed: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    output_tokens: float = 0.0
    characters: float = 0.0
    live: int = 0


class RateMeter:
    """Computes rates from totals.

    Attributes:
        history: latest samples, oldest first.
    """

    def __init__(self) -> None:
        self._previous = Totals()
        self.history: deque[Rates] = deque(maxlen=HISTORY_SAMPLES)

    def sample(self, totals: Totals, live: int, elapsed_s: float) -> Rates:
        """Adds and returns the rates since the previous sample, `elapsed_s` seconds ago."""
        now, previous = asdict(totals), asdict(self._previous)
        self._previous = Totals(**now)
        rates = Rates(
            **{name: round((value - previous[name]) / elapsed_s, 1) for name, value in now.items()}, live=live
        )
        self.history.append(rates)
        return rates
