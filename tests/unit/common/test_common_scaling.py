from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.types.scaling import SCALE_IN_SHARE, TARGET_SHARE, TierLoad, advise, mean_load, signals

TIER = TierLoad(workers=4, max_sequences=100, max_batched_tokens=8_192, total_blocks=1_000)
AMOUNTS = st.floats(0, 1e6)


def test_advise_idle_tier_shrinks_to_the_fewest() -> None:
    assert advise(TIER).workers == 1
    assert advise(TIER, min_workers=3).workers == 3
    assert advise(TIER, min_workers=0).workers == 0


@pytest.mark.parametrize(
    ("load", "workers", "decisive"),
    [
        (replace(TIER, requests=400), 5, "requests"),
        (replace(TIER, requests=200, decode_blocks=6_400), 8, "decode_blocks"),
        (replace(TIER, requests=200, prefill_tokens=6.5 * 2 * 8_192), 7, "prefill_tokens"),
    ],
)
def test_advise_follows_the_most_demanding_signal(load: TierLoad, workers: int, decisive: str) -> None:
    advice = advise(load)
    assert advice.workers == workers
    assert advice.decisive is not None
    assert advice.decisive.name == decisive


def test_advise_waiting_requests_take_what_a_full_worker_has_as_the_measure() -> None:
    load = replace(TIER, requests=40, waiting=25)  # the busy thresholds stop at 10 a worker, far below max_sequences
    assert advise(load).workers == math.ceil(65 / 10)


def test_advise_waiting_requests_without_a_worker_start_the_first_one() -> None:
    assert advise(TierLoad(workers=0, waiting=1), min_workers=0).workers == 1
    assert advise(replace(TIER, workers=0, waiting=170), min_workers=0).workers == 3


def test_advise_unknown_capacity_keeps_the_number() -> None:
    advice = advise(TierLoad(workers=3, starting=1, requests=50, decode_blocks=10), min_workers=0)
    assert (advice.workers, advice.decisive) == (4, None)


def test_advise_shrinks_only_to_a_number_with_room() -> None:
    just_fits = replace(TIER, requests=3 * TARGET_SHARE * 100)
    assert advise(just_fits).workers == 4
    assert advise(replace(just_fits, requests=just_fits.requests * SCALE_IN_SHARE)).workers == 3


def test_advise_counts_starting_workers_as_present() -> None:
    load = replace(TIER, workers=2, starting=2, requests=3.9 * TARGET_SHARE * 100)
    assert advise(load).workers == 4


def test_advise_most_workers_bounds_the_number() -> None:
    assert advise(replace(TIER, requests=10_000), max_workers=6).workers == 6


@pytest.mark.parametrize(
    ("load", "bounds"),
    [
        (replace(TIER, requests=-1), (1, 0)),
        (replace(TIER, waiting=math.nan), (1, 0)),
        (replace(TIER, decode_blocks=math.inf), (1, 0)),
        (TIER, (-1, 0)),
        (TIER, (5, 4)),
    ],
)
def test_advise_impossible_numbers_are_refused(load: TierLoad, bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"\.$"):
        advise(load, *bounds)


@given(AMOUNTS, AMOUNTS, AMOUNTS, st.integers(0, 50), st.integers(0, 5))
def test_advise_more_load_never_asks_for_fewer(
    requests: float, blocks: float, tokens: float, workers: int, fewest: int
) -> None:
    load = replace(TIER, workers=workers, requests=requests, decode_blocks=blocks, prefill_tokens=tokens)
    more = replace(load, requests=2 * requests, decode_blocks=2 * blocks, prefill_tokens=2 * tokens)
    assert advise(more, fewest).workers >= advise(load, fewest).workers >= fewest


@given(AMOUNTS, st.integers(1, 50))
def test_advise_advised_number_carries_the_load_within_every_target(requests: float, workers: int) -> None:
    load = replace(TIER, workers=workers, requests=requests)
    advised = advise(load).workers
    assert all(signal.needed <= advised + 1e-6 for signal in signals(load))


def test_mean_load_averages_amounts_and_keeps_the_last_workers() -> None:
    readings = [replace(TIER, requests=10, waiting=4), replace(TIER, workers=5, requests=20, waiting=0)]
    assert mean_load(readings) == replace(TIER, workers=5, requests=15, waiting=2)


def test_mean_load_without_readings_is_refused() -> None:
    with pytest.raises(ValueError, match="no readings"):
        mean_load([])
