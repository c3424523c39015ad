"""Built-in policies by name: which ranks are offered to the store, and at what cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeAlias

from services.common.errors import invalid
from services.router.scheduling.policies.contract import Picker, PolicyRequest
from services.router.scheduling.policies.offers import Demand, MakeOffer, RankCandidate, cache_aware, load_only
from services.router.scheduling.policies.pickers import PowerOfTwoPicker, RandomPicker, RoundRobinPicker
from services.router.state.reservations.cost import CostModel, Offer

OfferPolicy: TypeAlias = Callable[[Sequence[RankCandidate], Demand, CostModel], list[Offer]]
"""Returns the offers among which the store chooses the cheapest."""

_ANY = PolicyRequest("")


def kv(candidates: Sequence[RankCandidate], demand: Demand, model: CostModel) -> list[Offer]:
    """Prefers the rank with the lowest cost by load and overlap."""
    return [cache_aware(candidate, demand, model) for candidate in candidates]


def least_loaded(candidates: Sequence[RankCandidate], demand: Demand, model: CostModel) -> list[Offer]:
    """Prefers the rank with the least reserved load."""
    return [load_only(candidate, demand, model) for candidate in candidates]


def direct(candidates: Sequence[RankCandidate], demand: Demand, model: CostModel) -> list[Offer]:
    """Uses the only candidate; raises SluiceError (INVALID_ARGUMENT) unless there is exactly one."""
    if len(candidates) != 1:
        raise invalid(
            f"Policy direct requires exactly one candidate, but {len(candidates)} remain; send the id of one worker.",
            param="candidates",
        )
    return [cache_aware(candidates[0], demand, model)]


class PickedOnly:
    """Offers only the candidates that a picker prefers, without scores.

    Args:
        make_offer: returns the offer of a candidate.
    """

    def __init__(self, picker: Picker, make_offer: MakeOffer) -> None:
        self._picker = picker
        self._make_offer = make_offer

    def __call__(self, candidates: Sequence[RankCandidate], demand: Demand, model: CostModel) -> list[Offer]:
        """Returns the offers of the preferred candidates."""
        first = self._picker.pick(_ANY, candidates, [0.0] * len(candidates))[0]
        return [self._make_offer(candidate, demand, model) for candidate in first]


def all_policies(random: Random) -> dict[str, OfferPolicy]:
    """Returns new instances of all built-in policies by name."""
    return {
        "kv": kv,
        "round_robin": PickedOnly(RoundRobinPicker(), cache_aware),
        "random": PickedOnly(RandomPicker(random), cache_aware),
        "least_loaded": least_loaded,
        "power_of_two": PickedOnly(PowerOfTwoPicker(random), load_only),
        "direct": direct,
    }


BUILT_IN = frozenset(all_policies(Random()))
