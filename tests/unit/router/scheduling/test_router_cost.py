"""The cost function and the choice, against known answers."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from services.router.kv_index.index import Overlap
from services.router.reservations.cost import CostModel, choose, cost, softmax


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1.0, [0.50648, 0.307196, 0.186324]), (0.1, [0.993262, 0.006693, 0.000045])],
)
def test_softmax_normalises_costs_by_their_range(temperature: float, expected: list[float]) -> None:
    assert softmax([1, 2, 3], temperature) == pytest.approx(expected, abs=1e-6)
    assert softmax([10, 20, 30], temperature) == pytest.approx(expected, abs=1e-6)


def test_softmax_of_equal_costs_is_uniform() -> None:
    assert softmax([7, 7, 7, 7], 0.3) == [0.25] * 4


def test_cost_weighs_prefill_and_is_never_negative_for_it() -> None:
    assert cost(3, 10 - 4, 5, 1) == 14
    assert cost(3, 10 - 4, 5, 0.5) == 9.5
    assert cost(0, -2, 5, 1) == 5


def test_credits_per_tier() -> None:
    assert CostModel().credit(Overlap(4, 4, 4)) == 8


def test_cheapest_wins_then_the_emptiest() -> None:
    assert choose([2, 1, 3], [0, 9, 0], 0, Random(1)) == 1
    assert choose([1, 1, 3], [9, 8, 0], 0, Random(1)) == 1


def test_full_ties_are_broken_at_random() -> None:
    random = Random(1)
    seen = Counter(choose([1, 1, 5], [3, 3, 0], 0, random) for _ in range(1000))
    assert set(seen) == {0, 1}
    assert min(seen.values()) > 400


def test_temperature_samples_by_the_softmax() -> None:
    random = Random(1)
    seen = Counter(choose([1, 2, 3], [0, 0, 0], 1.0, random) for _ in range(10_000))
    assert [seen[at] / 10_000 for at in range(3)] == pytest.approx([0.506, 0.307, 0.186], abs=0.02)
