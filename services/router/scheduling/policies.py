"""Routing policies: which ranks are offered, and at what cost. The store chooses and reserves the cheapest offer."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, TypeAlias

from services.common.errors import invalid, quoted
from services.router.kv_index.index import Overlap
from services.router.reservations.cost import MILLI, NO_LOAD, CostModel, Load, Offer
from services.router.workers.worker import WorkerRank


class Candidate(NamedTuple):
    """A rank that may run the request, its overlap with the prompt and the number of blocks it holds."""

    slot: WorkerRank
    overlap: Overlap
    held: int


@dataclass(frozen=True, slots=True)
class Demand:
    """KV blocks that a request needs for its prompt and its expected output."""

    prompt_blocks: int
    output_blocks: int = 0


Policy: TypeAlias = Callable[[Sequence[Candidate], Demand, CostModel], list[Offer]]


def _offer(candidate: Candidate, demand: Demand, model: CostModel) -> Offer:
    """Returns the cache-aware offer of a candidate."""
    overlap = candidate.overlap
    uncached = demand.prompt_blocks - model.credit(overlap)
    added = demand.prompt_blocks - overlap.device
    # Blocks being computed for other requests are in the rank's reserved prefill: here they are neither work of this
    # request nor work ahead of it, while on any other rank this request would have to compute them.
    expected = model.predicted_credit * overlap.predicted
    ahead = model.predicted_credit * overlap.computing
    shared = overlap.predicted if model.predicted_credit else 0
    return Offer(
        candidate.slot,
        uncached - expected - ahead,
        added - expected,
        candidate.held,
        max(math.ceil((uncached - shared) * MILLI), 0),
        # At least one block for the output: otherwise any number of equal prompts would add no load.
        max(added - shared + demand.output_blocks, 1) * MILLI,
    )


def _load_only(candidate: Candidate, demand: Demand, model: CostModel) -> Offer:
    """Returns an offer whose cost ignores the cache; it still reserves the actual load."""
    blocks = float(demand.prompt_blocks)
    return _offer(candidate, demand, model)._replace(uncached=blocks, added=blocks, held=0)


def kv(candidates: Sequence[Candidate], demand: Demand, model: CostModel) -> list[Offer]:
    """Prefers the rank with the lowest cost by load and overlap."""
    return [_offer(candidate, demand, model) for candidate in candidates]


def least_loaded(candidates: Sequence[Candidate], demand: Demand, model: CostModel) -> list[Offer]:
    """Prefers the rank with the least reserved load."""
    return [_load_only(candidate, demand, model) for candidate in candidates]


def direct(candidates: Sequence[Candidate], demand: Demand, model: CostModel) -> list[Offer]:
    """Uses the only candidate; raises SluiceError (INVALID_ARGUMENT) unless there is exactly one."""
    if len(candidates) != 1:
        raise invalid(
            f"Policy direct requires exactly one candidate, but {len(candidates)} remain; send the id of one worker.",
            param="candidates",
        )
    return [_offer(candidates[0], demand, model)]


class RoundRobin:
    """Cycles through the ranks in order of name."""

    def __init__(self) -> None:
        self._turn = -1

    def __call__(self, candidates: Sequence[Candidate], demand: Demand, model: CostModel) -> list[Offer]:
        """Returns the offer of the next rank."""
        self._turn += 1
        ordered = sorted(candidates, key=lambda candidate: candidate.slot)
        return [_offer(ordered[self._turn % len(ordered)], demand, model)]


class RandomPolicy:
    """Chooses a rank uniformly at random."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def __call__(self, candidates: Sequence[Candidate], demand: Demand, model: CostModel) -> list[Offer]:
        """Returns the offer of a random rank."""
        return [_offer(self._random.choice(candidates), demand, model)]


class PowerOfTwo:
    """Chooses the less loaded of two random ranks."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def __call__(self, candidates: Sequence[Candidate], demand: Demand, model: CostModel) -> list[Offer]:
        """Returns the offers of two random ranks, or of the only one."""
        pair = self._random.sample(candidates, min(2, len(candidates)))
        return [_load_only(candidate, demand, model) for candidate in pair]


def all_policies(random: Random) -> dict[str, Policy]:
    """Returns new instances of all policies by name."""
    return {
        "kv": kv,
        "round_robin": RoundRobin(),
        "random": RandomPolicy(random),
        "least_loaded": least_loaded,
        "power_of_two": PowerOfTwo(random),
        "direct": direct,
    }


class PolicyRegistry:
    """Holds the policies by name, separate for each model and part of a request because some have state."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._sets: dict[tuple[str, str], dict[str, Policy]] = {}

    def get(self, name: str, model: str, part: str) -> Policy:
        """Returns a policy; raises SluiceError (INVALID_ARGUMENT) for an unknown name.

        Args:
            model: a served model, which bounds the number of instances.
        """
        found = self._sets.get((model, part))
        if found is None:
            found = self._sets[model, part] = all_policies(self._random)
        policy = found.get(name)
        if policy is None:
            raise invalid(f"Unknown policy {quoted(name)}; use one of {', '.join(found)}.", param="policy")
        return policy


def shortlist(
    offers: list[Offer], loads: Mapping[WorkerRank, Load], scale: float, most: int, random: Random
) -> list[Offer]:
    """Returns the `most` best offers by the last read loads, busy ones last, to bound the work of the store."""
    if len(offers) <= most:
        return offers

    def rank(offer: Offer) -> tuple[bool, float, int, float]:
        load = loads.get(offer.slot, NO_LOAD)
        return offer.busy(load), offer.cost(load, scale), offer.held, random.random()

    return heapq.nsmallest(most, offers, key=rank)
