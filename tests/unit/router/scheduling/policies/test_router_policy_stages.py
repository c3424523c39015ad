"""Built-in stages, and how a policy combines them."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from services.router.scheduling.policies.composition import Composition, StageConfig, StagePipeline
from services.router.scheduling.policies.contract import Candidate, PolicyRequest
from services.router.scheduling.policies.pickers import WeightedRandom
from services.router.state.reservations.cost import Limits, Offer
from services.router.state.reservations.table import Reservation, ReservationParams, ReservationTable
from services.router.state.workers.worker import WorkerRank

REQUEST = PolicyRequest("m", prompt_tokens=160, prompt_blocks=10, headers={"x-pool": "b"})
A = Candidate(
    "a",
    0,
    device_blocks=8,
    prefill_blocks=4,
    decode_blocks=10,
    requests=4,
    cost=50,
    capabilities=("lora",),
    labels={"pool": "b"},
)
B = Candidate("b", 0, device_blocks=2, predicted_blocks=3, decode_blocks=10, requests=1, cost=20, in_session=True)
C = Candidate("c", 1, cost=100, requests=2)
ALL = [A, B, C]


def ranking(**stages: Any) -> tuple[list[str], list[float], list[list[str]]]:
    """Ranks all candidates; returns names of those kept, their scores and the groups."""

    def configs(kind: str) -> tuple[StageConfig, ...]:
        given = stages.get(f"{kind}s", {})
        return tuple(StageConfig(kind, name, dict(parameters), weight) for name, (weight, parameters) in given.items())

    picker = StageConfig("picker", *stages.get("picker", ("max_score", {})))
    pipeline = StagePipeline(Composition("p", configs("filter"), configs("scorer"), picker))
    found = pipeline.rank(REQUEST, ALL)
    names = [each.worker_id for each in ALL]
    return (
        [names[at] for at in found.kept],
        [round(score, 3) for score in found.scores],
        [[names[at] for at in group] for group in found.groups],
    )


def scores(name: str, **parameters: Any) -> list[float]:
    return ranking(scorers={name: (1, parameters)})[1]


def kept(filter_: str, **parameters: Any) -> list[str]:
    return ranking(filters={filter_: (1, parameters)})[0]


def test_scorers_of_known_candidates_return_known_scores() -> None:
    assert scores("prefix_cache") == [0.8, 0.5, 0.0]
    assert scores("load") == [0.0, 0.762, 1.0]
    assert scores("load", prefill_scale=1) == [0.0, 0.286, 1.0]
    assert scores("requests") == [0.0, 1.0, 0.667]
    assert scores("kv_cost") == [0.625, 1.0, 0.0]
    assert scores("session") == [0.0, 1.0, 0.0]


def test_filters_of_known_candidates_keep_known_ones() -> None:
    assert kept("capability", has="lora") == ["a"]
    assert kept("capability", has="images") == []
    assert kept("worker", prefix="c") == ["c"]
    assert kept("worker", prefix="c", header="X-Pool") == ["b"]
    assert kept("worker", prefix="c", header="x-other") == ["c"]
    assert kept("label", name="pool", value="b") == ["a"]
    assert kept("label", name="pool", value="c") == []
    assert kept("label", name="pool", value="c", header="x-pool") == ["a"]
    assert kept("label", name="pool", header="x-other") == ["a", "b", "c"]
    assert kept("prefix_cache", least=0.5) == ["a", "b"]
    assert kept("prefix_cache", least=0.9) == ["a", "b", "c"]
    assert kept("prefix_cache", least=0.9, strict=True) == []
    assert kept("requests", below=3) == ["b", "c"]
    assert kept("requests", below=1) == ["a", "b", "c"]


def test_weights_of_scorers_are_relative() -> None:
    both: dict[str, tuple[float, dict[str, Any]]] = {"prefix_cache": (3.0, {}), "requests": (1.0, {})}
    assert ranking(scorers=both)[1:] == ([0.6, 0.625, 0.167], [["b"], ["a"], ["c"]])
    assert ranking(scorers=both, picker=("max_score", {"within": 0.05}))[2] == [["a", "b"], ["c"]]
    assert ranking(scorers={"prefix_cache": (0.0, {}), "requests": (1.0, {})})[1] == [0.0, 1.0, 0.667]


def test_policy_without_scorers_leaves_the_choice_to_the_store() -> None:
    assert ranking() == (["a", "b", "c"], [0, 0, 0], [["a", "b", "c"]])


def test_pickers_of_one_candidate_offer_only_that_one() -> None:
    assert len(ranking(picker=("random", {}))[2]) == 1
    assert ranking(picker=("round_robin", {}))[2] == [["a"]]
    pair = ranking(scorers={"requests": (1, {})}, picker=("power_of_two", {}))[2]
    assert len([name for group in pair for name in group]) == 2
    assert pair == sorted(pair, key=lambda group: {"b": 0, "c": 1, "a": 2}[group[0]])


def test_weighted_random_draws_in_proportion_to_the_scores() -> None:
    picker = WeightedRandom(Random(1))
    first = Counter(picker.pick(REQUEST, ALL, [0.6, 0.3, 0.1])[0][0].worker_id for _ in range(4_000))
    assert [round(first[name] / 4_000, 1) for name in "abc"] == [0.6, 0.3, 0.1]
    sharp = WeightedRandom(Random(1), sharpness=4)
    assert Counter(sharp.pick(REQUEST, ALL, [0.6, 0.3, 0.1])[0][0].worker_id for _ in range(1_000))["a"] > 900
    assert {len(picker.pick(REQUEST, ALL, [0.0, 0.0, 1.0])) for _ in range(9)} == {3}
    assert {picker.pick(REQUEST, ALL, [0.0, 0.0, 1.0])[0][0].worker_id for _ in range(50)} == {"c"}


def test_offer_of_an_earlier_group_is_chosen_at_any_load_and_the_cheapest_within_a_group() -> None:
    slots = [WorkerRank(name, 0) for name in ("early", "full", "late", "later")]
    table = ReservationTable(lambda: 0, Random(1))
    table.put(Reservation("r0", slots[0], 1 << 40, 1 << 40, 1))
    full = Offer(slots[1], 0.0, 0.0, 0, 1, 1, Limits(0, 0, 0), group=0)
    late = [Offer(slots[2], 0.0, 0.001, 0, 1, 1, group=2), Offer(slots[3], 0.0, 0.0, 0, 1, 1, group=2)]
    early = Offer(slots[0], 9e9, 9e9, 5, 1, 1, group=1)
    assert table.select([*late, early, full], ReservationParams("", 1)).slot == slots[0]
    assert table.select([*late, full], ReservationParams("", 1)).slot == slots[3]
