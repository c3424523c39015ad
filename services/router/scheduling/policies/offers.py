"""Offers of candidates to the store, which chooses and reserves the cheapest one."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, TypeAlias

from services.router.state.kv_index.index import Overlap
from services.router.state.reservations.cost import MILLI, NO_LOAD, CostModel, Load, Offer
from services.router.state.workers.worker import WorkerRank

GROUP_STEP = float(1 << 32)
"""Blocks added to the cost of an offer for each group of a picker's order before its own.

No sum of reserved loads comes near it, so the store prefers any offer of an earlier group, and compares costs within a
group. Doubles of this size still differ for costs a thousandth of a block apart.
"""

MAX_GROUPS = 256
"""Groups of ranks that a policy can put in an order, with exact costs; those after it count as one."""


class RankCandidate(NamedTuple):
    """A rank that may run the request, its overlap with the prompt and the number of blocks it holds."""

    slot: WorkerRank
    overlap: Overlap
    held: int

    @property
    def worker_id(self) -> str:
        """Id of its worker."""
        return self.slot.worker_id

    @property
    def rank(self) -> int:
        """Data-parallel rank of its worker."""
        return self.slot.rank


@dataclass(frozen=True, slots=True)
class Demand:
    """KV blocks that a request needs for its prompt and its expected output.

    Attributes:
        encoding: work of encoding each media item: the number of leading blocks that contain all of its tokens, and the
            work in blocks of prefill.
    """

    prompt_blocks: int
    output_blocks: int = 0
    encoding: tuple[tuple[int, float], ...] = ()

    def to_encode(self, cached_blocks: int) -> float:
        """Returns the work, in blocks of prefill, of the items that a cached prefix does not contain entirely."""
        return sum(work for blocks, work in self.encoding if blocks > cached_blocks)


MakeOffer: TypeAlias = Callable[[RankCandidate, Demand, CostModel], Offer]


def cache_aware(candidate: RankCandidate, demand: Demand, model: CostModel) -> Offer:
    """Returns an offer whose cost counts load and overlap."""
    overlap = candidate.overlap
    uncached = demand.prompt_blocks - model.credit(overlap)
    if demand.encoding:
        uncached += model.encoder_load_scale * demand.to_encode(overlap.blocks + overlap.predicted)
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


def load_only(candidate: RankCandidate, demand: Demand, model: CostModel) -> Offer:
    """Returns an offer whose cost ignores the cache; it still reserves the actual load."""
    blocks = float(demand.prompt_blocks)
    work = blocks + model.encoder_load_scale * demand.to_encode(0)
    return cache_aware(candidate, demand, model)._replace(uncached=work, added=blocks, held=0)


def in_groups(offers: Sequence[Offer], groups: Mapping[WorkerRank, int]) -> list[Offer]:
    """Returns the offers of ranks in groups, with costs by which the store prefers earlier groups.

    Args:
        groups: number of each rank's group, the most preferred is 0; offers of other ranks are omitted.
    """
    return [
        offer._replace(added=offer.added + GROUP_STEP * min(groups[offer.slot], MAX_GROUPS))
        for offer in offers
        if offer.slot in groups
    ]


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
