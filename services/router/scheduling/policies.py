"""Policies: which ranks are offered, and at what cost. The cheapest offer is chosen and booked by the store."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from services.common.errors import invalid, quoted
from services.router.kv_index.index import Overlap
from services.router.reservations.cost import MILLI, NO_LOAD, CostModel, Load, Offer
from services.router.workers.worker import WorkerRank


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rank that may run the request: its overlap with the prompt and the blocks it holds."""

    slot: WorkerRank
    overlap: Overlap
    held: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs: KV blocks of its prompt, KV blocks of the output it expects to make."""

    prompt_blocks: int
    output_blocks: int = 0


Policy: TypeAlias = Callable[[Sequence[Candidate], Demand, CostModel], list[Offer]]


def _offer(candidate: Candidate, demand: Demand, model: CostModel) -> Offer:
    """The cache-aware offer of a candidate."""
    overlap = candidate.overlap
    uncached = demand.prompt_blocks - model.credit(overlap)
    added = demand.prompt_blocks - overlap.device
    # What is being computed for others is in the rank's booked prefill and would be work of this request anywhere else:
    # it is neither work of its own nor work ahead of it.
    expected = model.predicted_credit * overlap.predicted
    ahead = model.predicted_credit * overlap.computing
    shared = overlap.predicted if model.predicted_credit else 0
    return Offer(
        candidate.slot,
        uncached - expected - ahead,
        added - expected,
        candidate.held,
        max(math.ceil((uncached - shared) * MILLI), 0),
        # However much is shared, its output needs a block: else any number of equal prompts would weigh nothing.
        max(added - shared + demand.output_blocks, 1) * MILLI,
    )


def _blind(candidate: Candidate, demand: Demand, model: CostModel) -> Offer:
    """Chosen by load alone; what is booked is still what the request will really cost there."""
    blocks = float(demand.prompt_blocks)
    return _offer(candidate, demand, model)._replace(uncached=blocks, added=blocks, held=0)


def kv(candidates: Sequence[Candidate], demand: Demand, model: CostModel) -> list[Offer]:
    """Where the least remains to be computed, given the load."""
    return [_offer(candidate, demand, model) for candidate in candidates]


def least_loaded(candidates: Sequence[Candidate], demand: Demand, model: CostModel) -> list[Offer]:
    """Where the least is booked."""
    return [_blind(candidate, demand, model) for candidate in candidates]


def direct(candidates: Sequence[Candidate], demand: Demand, model: CostModel) -> list[Offer]:
    """The one rank the caller named; SluiceError(INVALID_ARGUMENT) when that is not exactly one."""
    if len(candidates) != 1:
        raise invalid(f"Policy direct needs exactly one candidate and {len(candidates)} are left.", param="candidates")
    return [_offer(candidates[0], demand, model)]


class RoundRobin:
    """One after the other, by name."""

    def __init__(self) -> None:
        self._turn = -1

    def __call__(self, candidates: Sequence[Candidate], demand: Demand, model: CostModel) -> list[Offer]:
        """The next one."""
        self._turn += 1
        ordered = sorted(candidates, key=lambda candidate: candidate.slot)
        return [_offer(ordered[self._turn % len(ordered)], demand, model)]


class RandomPolicy:
    """Uniformly at random."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def __call__(self, candidates: Sequence[Candidate], demand: Demand, model: CostModel) -> list[Offer]:
        """One of them."""
        return [_offer(self._random.choice(candidates), demand, model)]


class PowerOfTwo:
    """The less loaded of two taken at random."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def __call__(self, candidates: Sequence[Candidate], demand: Demand, model: CostModel) -> list[Offer]:
        """Two of them, or the only one."""
        pair = self._random.sample(candidates, min(2, len(candidates)))
        return [_blind(candidate, demand, model) for candidate in pair]


def all_policies(random: Random) -> dict[str, Policy]:
    """Every policy by its name, with state of its own."""
    return {
        "kv": kv,
        "round_robin": RoundRobin(),
        "random": RandomPolicy(random),
        "least_loaded": least_loaded,
        "power_of_two": PowerOfTwo(random),
        "direct": direct,
    }


class Shelf:
    """Policies by name; every model and every part of a request has its own, so that turns are not mixed up."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._sets: dict[tuple[str, str], dict[str, Policy]] = {}

    def get(self, name: str, model: str, part: str) -> Policy:
        """A policy; SluiceError(INVALID_ARGUMENT) when there is none of that name.

        Args:
            model: one that is served, so that there are not more of them than workers brought.
        """
        found = self._sets.get((model, part))
        if found is None:
            found = self._sets[model, part] = all_policies(self._random)
        policy = found.get(name)
        if policy is None:
            raise invalid(f"Policy {quoted(name)} is unknown; choose from {', '.join(found)}.", param="policy")
        return policy


def shortlist(
    offers: list[Offer], loads: Mapping[WorkerRank, Load], scale: float, most: int, random: Random
) -> list[Offer]:
    """The `most` best offers by the loads last seen, busy ones last, so that a store need not look at a thousand."""
    if len(offers) <= most:
        return offers

    def rank(offer: Offer) -> tuple[bool, float, int, float]:
        load = loads.get(offer.slot, NO_LOAD)
        return offer.busy(load), offer.cost(load, scale), offer.held, random.random()

    return heapq.nsmallest(most, offers, key=rank)
