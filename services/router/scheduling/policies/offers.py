"""Offers of candidates to the store, which chooses and reserves the cheapest one."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from services.router.state.kv_index.index import Overlap
from services.router.state.reservations.cost import MILLI, NO_LOAD, CostModel, Load, Offer
from services.router.state.workers.worker import WorkerRank


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


MakeOffer: TypeAlias = Callable[[WorkerRank, Overlap, int, Demand, CostModel], Offer]
"""Returns the offer of a rank, with its overlap and the number of blocks it holds, for a demand."""


def cache_aware(slot: WorkerRank, overlap: Overlap, held: int, demand: Demand, model: CostModel) -> Offer:
    """Returns an offer whose cost counts load and overlap."""
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
        slot,
        uncached=uncached - expected - ahead,
        added=added - expected,
        held=held,
        book_prefill=max(math.ceil((uncached - shared) * MILLI), 0),
        # At least one block for the output: otherwise any number of equal prompts would add no load.
        book_decode=max(added - shared + demand.output_blocks, 1) * MILLI,
    )


def load_only(slot: WorkerRank, overlap: Overlap, held: int, demand: Demand, model: CostModel) -> Offer:
    """Returns an offer whose cost ignores the cache; it still reserves the actual load."""
    blocks = float(demand.prompt_blocks)
    work = blocks + model.encoder_load_scale * demand.to_encode(0)
    return cache_aware(slot, overlap, held, demand, model)._replace(uncached=work, added=blocks, held=0)


def shortlist(
    offers: list[Offer], loads: Mapping[WorkerRank, Load], scale: float, most: int, random: Random
) -> list[Offer]:
    """Returns the `most` best offers by the last read loads, busy ones last, to bound the work of the store."""
    if len(offers) <= most:
        return offers

    def rank(offer: Offer) -> tuple[bool, int, float, int, float]:
        load = loads.get(offer.slot, NO_LOAD)
        return offer.busy(load), offer.group, offer.cost(load, scale), offer.held, random.random()

    return heapq.nsmallest(most, offers, key=rank)
