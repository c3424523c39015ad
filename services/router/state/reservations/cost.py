"""Cost of running a prompt on a rank, in blocks, and the choice of the cheapest rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from services.router.state.kv_index.index import Overlap
from services.router.state.workers.worker import WorkerRank

PREFILL_LOAD_SCALE = 8.0
"""Default weight of a prefill block relative to a decode block; benchmarks/README.md has the measurements."""

MILLI = 1000  # loads are reserved in thousandths of a block: integer sums return to zero, floats drift


@dataclass(frozen=True, slots=True)
class CostModel:
    """Parameters of the cost function.

    A credit, 0 to 1, is the share of a block's computation saved if the block is on that tier, or predicted.
    `encoder_load_scale` is the weight of encoding a token's worth of a media item relative to computing a token.
    """

    prefill_load_scale: float = PREFILL_LOAD_SCALE
    device_credit: float = 1.0
    host_credit: float = 0.75
    disk_credit: float = 0.25
    temperature: float = 0.0
    predicted_credit: float = 0.9
    encoder_load_scale: float = 1.0

    def credit(self, overlap: Overlap) -> float:
        """Returns the blocks of computation saved by an overlap."""
        return self.device_credit * overlap.device + self.host_credit * overlap.host + self.disk_credit * overlap.disk


class Load(NamedTuple):
    """Reserved load of a rank: blocks of prefill not computed yet, KV blocks of its requests, and their number."""

    prefill: float = 0.0
    decode: float = 0.0
    requests: int = 0


NO_LOAD = Load()


class Limits(NamedTuple):
    """Reserved loads, as in Load, at which a rank accepts no more requests."""

    prefill: float
    decode: float
    requests: float

    def less(self, load: Load) -> Limits:
        """Returns the limits for a table that lacks this load."""
        return Limits(self.prefill - load.prefill, self.decode - load.decode, self.requests - load.requests)


class Offer(NamedTuple):
    """A rank that may run a request: the part of its cost that does not depend on its load, and the load to reserve.

    Attributes:
        uncached: blocks of the request minus the credit for its overlap.
        added: KV blocks that the request would add.
        held: blocks in the rank's cache; of equal costs, the rank with fewer wins, which spreads prompts.
        book_prefill: prefill load to reserve, thousandths of a block.
        book_decode: decode load to reserve, thousandths of a block.
        limits: loads at which the rank accepts no more requests; None: never.
        group: an offer of a lower group is preferred at any cost.
    """

    slot: WorkerRank
    uncached: float
    added: float
    held: int
    book_prefill: int
    book_decode: int
    limits: Limits | None = None
    group: int = 0

    def busy(self, load: Load) -> bool:
        """Returns whether the rank accepts no more requests at this load."""
        return self.limits is not None and any(booked >= most for booked, most in zip(load, self.limits, strict=True))

    def cost(self, load: Load, prefill_load_scale: float) -> float:
        """Returns the cost in blocks at this load of the rank."""
        return cost(load.prefill, self.uncached, load.decode + self.added, prefill_load_scale)


def cost(prefill_outstanding: float, uncached_blocks: float, decode_blocks: float, prefill_load_scale: float) -> float:
    """Returns `scale · max(prefill outstanding + request blocks − overlap credit, 0) + decode blocks`.

    Args:
        prefill_outstanding: blocks reserved on the rank and not computed yet.
        uncached_blocks: the request's blocks minus the credit for its overlap.
        decode_blocks: KV blocks of the rank's running requests including this one, shared blocks counted once.
        prefill_load_scale: weight of prefill relative to decode.
    """
    return prefill_load_scale * max(prefill_outstanding + uncached_blocks, 0.0) + decode_blocks


def softmax(costs: Sequence[float], temperature: float) -> list[float]:
    """Returns the probability of each choice, highest for the lowest cost; costs are normalized by their range."""
    low, high = min(costs), max(costs)
    if high == low:
        return [1 / len(costs)] * len(costs)
    weights = [math.exp(-(each - low) / (high - low) / temperature) for each in costs]
    total = sum(weights)
    return [weight / total for weight in weights]


def choose(costs: Sequence[float], held: Sequence[int], temperature: float, random: Random) -> int:
    """Returns the index of the choice: lowest cost, then fewest blocks, then random; or a sample by temperature."""
    if temperature > 0:
        return random.choices(range(len(costs)), softmax(costs, temperature))[0]
    best = min(zip(costs, held, strict=True))
    ties = [at for at, pair in enumerate(zip(costs, held, strict=True)) if pair == best]
    return ties[0] if len(ties) == 1 else random.choice(ties)
