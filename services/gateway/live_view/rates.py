"""Rates a second, out of running totals, and the last two minutes of them."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass

from services.gateway.live_view.request_history import Totals

KEPT_SAMPLES = 120


@dataclass(frozen=True, slots=True)
class Rates:
    """Each a second, except `live`: streams under way at the moment."""

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
    """Turns totals into rates.

    Attributes:
        history: the last samples, oldest first.
    """

    def __init__(self) -> None:
        self._before = Totals()
        self.history: deque[Rates] = deque(maxlen=KEPT_SAMPLES)

    def sample(self, totals: Totals, live: int, elapsed_s: float) -> Rates:
        """The rates since the last sample, `elapsed_s` seconds ago."""
        now, before = asdict(totals), asdict(self._before)
        self._before = Totals(**now)
        rates = Rates(**{name: round((value - before[name]) / elapsed_s, 1) for name, value in now.items()}, live=live)
        self.history.append(rates)
        return rates
