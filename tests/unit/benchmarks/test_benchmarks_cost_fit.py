"""Costs are fitted to loads, and tested on those held back."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from cost_fit import Idle, Sample, errors, fit, kept, non_negative_least_squares
from costs import MAX_ERROR, merged, table
from hypothesis import given
from hypothesis import strategies as st

from sluice.cli.sizing.costs import FILE, TIERS, WORKER, Workload, read

NAMES = (*TIERS, WORKER)
IDLE = Idle(dict.fromkeys(NAMES, 0.01), dict.fromkeys(NAMES, 1e8))
TRUE = (1e-3, 2e-6, 3e-5)


def sample(
    name: str,
    rate: float,
    prompt: float,
    output: float,
    streams: float = 10,
    held_back: bool = False,
    factor: float = 1,
) -> Sample:
    cores = 0.01 + rate * (TRUE[0] + prompt * TRUE[1] + output * TRUE[2]) * factor
    memory = 1e8 + streams * 1e5
    return Sample(
        name,
        held_back,
        Workload(rate, prompt, output, streams),
        dict.fromkeys(NAMES, cores),
        dict.fromkeys(NAMES, memory),
    )


LOADS = [
    sample("a", 30, 50, 32, 16),
    sample("b", 10, 50, 256, 32),
    sample("c", 7, 2_000, 32, 16),
    sample("d", 6, 1_000, 192, 48),
    sample("e", 20, 400, 100, 20, held_back=True),
]


def test_fit_exact_loads_gives_their_costs() -> None:
    costs = fit(IDLE, LOADS)
    tier = costs.tiers["gateway"]
    assert (tier.request_s, tier.prompt_token_s, tier.output_token_s) == pytest.approx(TRUE)
    assert tier.stream_bytes == pytest.approx(1e5)
    assert costs.error == pytest.approx(0, abs=1e-9)
    assert (costs.max_streams, costs.max_prompt_tokens, costs.max_output_tokens) == (48, 2_000, 256)


def test_fit_held_back_load_gives_the_error_and_does_not_change_the_costs() -> None:
    twice = sample("f", 20, 400, 100, 20, held_back=True, factor=2)
    costs = fit(IDLE, [*LOADS, twice])
    assert costs.tiers["router"].request_s == pytest.approx(TRUE[0])
    assert costs.error == pytest.approx(abs(errors(costs.tiers, [twice])["f"]))
    assert 0.45 < costs.error < 0.5
    assert costs.tiers["router"].error == pytest.approx(costs.error)


@pytest.mark.parametrize("loads", [[], LOADS[:3], LOADS[:4], [LOADS[4]] * 5])
def test_fit_too_few_loads_is_refused(loads: list[Sample]) -> None:
    with pytest.raises(ValueError, match="A fit needs"):
        fit(IDLE, loads)


def test_fit_load_without_cpu_time_is_refused() -> None:
    none = replace(LOADS[0], cores=dict.fromkeys(NAMES, 0.0))
    with pytest.raises(ValueError, match="used no CPU time under a"):
        fit(IDLE, [none, *LOADS[1:]])


@given(st.lists(st.lists(st.floats(0, 100), min_size=3, max_size=3), min_size=4, max_size=8))
def test_non_negative_least_squares_any_rows_gives_no_negative_factor(rows: list[list[float]]) -> None:
    targets = [row[0] - row[1] for row in rows]
    factors = non_negative_least_squares(rows, targets)
    assert min(factors) >= 0


def test_non_negative_least_squares_negative_factor_becomes_zero() -> None:
    rows = [[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]
    assert non_negative_least_squares(rows, [3.0, 2.0, 1.0]) == pytest.approx((2.0, 0.0))


def test_merged_rounds_take_the_median_of_the_time_of_a_request() -> None:
    rounds = [sample("a", rate, 50, 32, factor=factor) for rate, factor in ((10, 1), (20, 3), (40, 1.5))]
    middle = merged(rounds)
    assert middle.work.requests_per_s == 20
    assert middle.cores["gateway"] == pytest.approx(20 * rounds[2].cores["gateway"] / 40)


def test_table_names_every_tier_and_load() -> None:
    lines = "\n".join(table(fit(IDLE, LOADS), LOADS))
    assert all(f"| {name} |" in lines for name in (*NAMES, *(load.name for load in LOADS)))


@pytest.mark.parametrize("model", json.loads(FILE.read_text("utf-8"))["models"])
def test_costs_that_are_included_are_the_fit_of_their_loads(model: str) -> None:
    document = json.loads(FILE.read_text("utf-8"))["models"][model]
    idle, samples = kept(document)
    costs, fitted = read()[model], fit(idle, samples)
    assert costs.error == pytest.approx(fitted.error)
    for name in NAMES:
        assert asdict(costs.tiers[name]) == pytest.approx(asdict(fitted.tiers[name]))
    assert sum(load.held_back for load in samples) == 3
    assert costs.error <= MAX_ERROR
