"""What a request costs stays below the ceilings in benchmarks/counts.json; `make count` shows where it goes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from count import WITHOUT_REQUEST, Counted, above_ceilings, ceilings, count_kinds
from count_kinds import KINDS

TRIES = 40
"""Most requests of a kind above its ceilings: a busy machine has more periodic work in a window, and more messages."""


@pytest.fixture(scope="module")
def counted() -> dict[str, Counted]:
    return count_kinds(list(KINDS), TRIES, enough=lambda counted: not above_ceilings(counted))


def test_request_of_each_kind_stays_below_its_ceilings(counted: dict[str, Counted]) -> None:
    assert above_ceilings(counted) == [], "less is called for, or `make count ARGS=--write` and a reason in the commit"


def test_every_kind_has_ceilings() -> None:
    assert ceilings().keys() == KINDS.keys()


def test_refused_request_costs_at_most_half_of_a_served_one(counted: dict[str, Counted]) -> None:
    served = calls(counted["chat whole, 8 tokens"].counts)
    for name, found in counted.items():
        if name.startswith("refused"):
            assert calls(found.counts) <= served / 2, name


def calls(counts: Mapping[str, Mapping[str, int]]) -> int:
    return sum(of_service.get("calls", 0) + of_service.get("C calls", 0) for of_service in counts.values())


def test_call_more_than_the_margin_is_found(counted: dict[str, Counted]) -> None:
    found = counted["RouteQuery"]
    found.counts["router"]["calls"] += 150
    try:
        assert any("calls of router" in sentence for sentence in above_ceilings({"RouteQuery": found}))
    finally:
        found.counts["router"]["calls"] -= 150


def test_calls_that_a_window_without_a_request_has_too_are_not_the_requests() -> None:
    kept = ceilings()["RouteQuery"]["router"]
    more = {name: count + 150 for name, count in kept.items()}
    periodic = {WITHOUT_REQUEST: Counted({"router": {"calls": 150, "C calls": 150}})}
    sentences = above_ceilings({"RouteQuery": Counted({"router": more}), **periodic})
    assert not any("calls" in sentence for sentence in sentences)
    assert any("calls of router" in sentence for sentence in above_ceilings({"RouteQuery": Counted({"router": more})}))
