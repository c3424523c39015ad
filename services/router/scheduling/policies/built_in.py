"""Built-in policies by name: which ranks are offered to the store, and at what cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from services.common.base.errors import invalid
from services.router.scheduling.policies.contract import Picker, PolicyRequest, T
from services.router.scheduling.policies.offers import MakeOffer, cache_aware, load_only
from services.router.scheduling.policies.pickers import PowerOfTwoPicker, RandomPicker, RoundRobinPicker
from services.router.state.workers.worker import WorkerRank

_ANY = PolicyRequest("")


@dataclass(frozen=True, slots=True)
class BuiltInPolicy:
    """A policy whose cheapest offer the store reserves.

    Attributes:
        make_offer: returns the offer of a rank; it does not depend on other ranks.
        picker: picks the ranks to offer, without scores; None: all are offered.
    """

    make_offer: MakeOffer
    picker: Picker | None = None

    def offered(self, slots: Sequence[WorkerRank]) -> Sequence[WorkerRank]:
        """Returns the ranks to offer."""
        return slots if self.picker is None else self.picker.pick(_ANY, slots, [0.0] * len(slots))[0]


class OnlyPicker(Picker):
    """Picks the only candidate; raises SluiceError (INVALID_ARGUMENT) unless there is exactly one."""

    def pick(self, request: PolicyRequest, candidates: Sequence[T], scores: Sequence[float]) -> Sequence[Sequence[T]]:
        """Returns the only candidate."""
        if len(candidates) == 1:
            return [candidates]
        raise invalid(
            f"Policy direct requires exactly one candidate, but {len(candidates)} remain; send the id of one worker.",
            param="candidates",
        )


def all_policies(random: Random) -> dict[str, BuiltInPolicy]:
    """Returns new instances of all built-in policies by name."""
    return {
        "kv": BuiltInPolicy(cache_aware),
        "round_robin": BuiltInPolicy(cache_aware, RoundRobinPicker()),
        "random": BuiltInPolicy(cache_aware, RandomPicker(random)),
        "least_loaded": BuiltInPolicy(load_only),
        "power_of_two": BuiltInPolicy(load_only, PowerOfTwoPicker(random)),
        "direct": BuiltInPolicy(cache_aware, OnlyPicker()),
    }


BUILT_IN = frozenset(all_policies(Random()))
