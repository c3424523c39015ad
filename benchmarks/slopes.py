"""How fast what a process holds grows, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean

BLOCKS = 12
"""Means that a line is fitted to: neighbouring samples depend on each other, means of long blocks hardly do."""
WARM_UP = 0.25
"""Part of the time before a slope is measured: pools and caches fill."""
ERRORS = 2.0
"""Standard errors that a slope must exceed to be called growth."""
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth in units an hour, with its standard error, over a time in hours."""

    per_hour: float
    error: float
    hours: float

    def grows(self, least: float) -> bool:
        """Returns whether it is growth beyond its error, and of at least `least` units in the time."""
        return self.per_hour > ERRORS * self.error and self.per_hour * self.hours > least


def slope_of(samples: Sequence[tuple[float, float]]) -> Slope:
    """Returns the slope of (seconds, value) samples after their warm-up, by least squares over means of blocks.

    Raises:
        ValueError: there are fewer samples than `BLOCKS` after the warm-up.
    """
    first, last = samples[0][0], samples[-1][0]
    kept = [sample for sample in samples if sample[0] >= first + WARM_UP * (last - first)]
    if len(kept) < BLOCKS:
        raise ValueError(f"a slope needs {BLOCKS} samples after the warm-up, and there are {len(kept)}")
    means = [
        (fmean(time_s for time_s, _ in block), fmean(value for _, value in block))
        for block in (kept[len(kept) * at // BLOCKS : len(kept) * (at + 1) // BLOCKS] for at in range(BLOCKS))
    ]
    centre_s, centre = fmean(time_s for time_s, _ in means), fmean(value for _, value in means)
    spread = sum((time_s - centre_s) ** 2 for time_s, _ in means)
    per_s = sum((time_s - centre_s) * (value - centre) for time_s, value in means) / spread
    residues = sum((value - centre - per_s * (time_s - centre_s)) ** 2 for time_s, value in means)
    error = sqrt(residues / (BLOCKS - 2) / spread) if BLOCKS > 2 else inf
    return Slope(per_s * HOUR_S, error * HOUR_S, (kept[-1][0] - kept[0][0]) / HOUR_S)
