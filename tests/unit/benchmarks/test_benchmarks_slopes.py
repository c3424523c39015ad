"""Lines through samples of what processes hold: growth is told from noise, and from what fills at first."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slopes import HOUR_S, slope_of

SAMPLES, EVERY_S = 240, 30.0


def samples(per_hour: float, noise: float, seed: int, fills: float = 0.0) -> list[tuple[float, float]]:
    """Two hours that grow, with noise of which neighbours share a part, and a pool that fills in the first minutes."""
    draw, drift, found = random.Random(seed), 0.0, []
    for number in range(SAMPLES):
        drift = 0.5 * drift + draw.gauss(0, noise)
        time_s = number * EVERY_S
        found.append((time_s, 100 + per_hour * time_s / HOUR_S + drift + min(time_s / 600, 1) * fills))
    return found


@given(seed=st.integers(0, 10_000), per_hour=st.floats(5, 50))
def test_growth_beyond_its_error_is_reported_with_its_size(seed: int, per_hour: float) -> None:
    slope = slope_of(samples(per_hour, 0.5, seed, fills=40))
    assert slope.per_hour == pytest.approx(per_hour, abs=5 * slope.error + 0.5)
    assert slope.grows(1.0)


def test_noise_and_a_pool_that_fills_are_no_growth() -> None:
    grown = [seed for seed in range(200) if slope_of(samples(0.0, 0.5, seed, fills=40)).grows(1.0)]
    assert not grown


def test_growth_below_the_least_is_none() -> None:
    slope = slope_of(samples(1.0, 0.0, 1))
    assert slope.grows(1.0)
    assert not slope.grows(2.0)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="12 samples"):
        slope_of(samples(1.0, 0.0, 1)[:14])
