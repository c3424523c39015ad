"""What it costs to run a prompt on a rank, in blocks, and how the cheapest is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from services.router.kv_index.index import Overlap
from services.router.workers.worker import WorkerRank

PREFILL_LOAD_SCALE = 8.0
"""Default weight of a block to compute against one to keep; benchmarks/README.md has the runs behind it."""

MILLI = 1000  # booked loads are counted in thousandths of a block: sums of integers return to zero, floats drift


@dataclass(frozen=True, slots=True)
class CostModel:
    """The knobs of the cost function.

    Credits, 0 to 1, say how much of a block's computation is saved when it lies on that tier, or is expected there.
    """

    prefill_load_scale: float = PREFILL_LOAD_SCALE
    device_credit: float = 1.0
    host_credit: float = 0.75
    disk_credit: float = 0.25
    temperature: float = 0.0
    predicted_credit: float = 0.9

    def credit(self, overlap: Overlap) -> float:
        """Blocks of computation that an overlap saves."""
        return self.device_credit * overlap.device + self.host_credit * overlap.host + self.disk_credit * overlap.disk


class Load(NamedTuple):
    """What is booked on a rank, in blocks: prefill not computed yet, KV blocks of its requests, and how many."""

    prefill: float = 0.0
    decode: float = 0.0
    requests: int = 0


NO_LOAD = Load()


class Limits(NamedTuple):
    """Booked loads, as in Load, from which on a rank takes nothing more."""

    prefill: float
    decode: float
    requests: float

    def less(self, load: Load) -> Limits:
        """The same for a book that does not know of a load."""
        return Limits(self.prefill - load.prefill, self.decode - load.decode, self.requests - load.requests)


class Offer(NamedTuple):
    """A rank that may run a request: the part of its cost that does not depend on what is booked, and what to book.

    `uncached`: blocks of the request less the credit for its overlap. `added`: KV blocks the request would add.
    `held`: blocks in the rank's cache; of equal costs the one that holds fewer wins, so that prompts spread.
    `book_prefill`, `book_decode`: thousandths of a block. `limits`: when the rank takes nothing more; None for never.
    """

    slot: WorkerRank
    uncached: float
    added: float
    held: int
    book_prefill: int
    book_decode: int
    limits: Limits | None = None

    def busy(self, load: Load) -> bool:
        """Whether the rank takes nothing more, given what is booked on it."""
        return self.limits is not None and any(booked >= most for booked, most in zip(load, self.limits, strict=True))

    def cost(self, load: Load, prefill_load_scale: float) -> float:
        """Cost in blocks given what is booked on the rank."""
        return cost(load.prefill, self.uncached, load.decode + self.added, prefill_load_scale)


def cost(prefill_outstanding: float, uncached_blocks: float, decode_blocks: float, prefill_load_scale: float) -> float:
    """`scale · max(prefill outstanding + request blocks − overlap credit, 0) + decode blocks`.

    Args:
        prefill_outstanding: blocks booked on the rank and not computed yet.
        uncached_blocks: the request's blocks less the credit for what the rank holds of them.
        decode_blocks: KV blocks the rank would hold for its running requests with this one, shared ones once.
        prefill_load_scale: weight of prefill against decode.
    """
    return prefill_load_scale * max(prefill_outstanding + uncached_blocks, 0.0) + decode_blocks


def softmax(costs: Sequence[float], temperature: float) -> list[float]:
    """Probabilities of choosing each, cheapest most likely; costs are normalised by their range first."""
    low, high = min(costs), max(costs)
    if high == low:
        return [1 / len(costs)] * len(costs)
    weights = [math.exp(-(each - low) / (high - low) / temperature) for each in costs]
    total = sum(weights)
    return [weight / total for weight in weights]


def choose(costs: Sequence[float], held: Sequence[int], temperature: float, random: Random) -> int:
    """Position of the choice: the cheapest, of those the emptiest, of those any; with a temperature a sample."""
    if temperature > 0:
        return random.choices(range(len(costs)), softmax(costs, temperature))[0]
    best = min(zip(costs, held, strict=True))
    ties = [at for at, pair in enumerate(zip(costs, held, strict=True)) if pair == best]
    return ties[0] if len(ties) == 1 else random.choice(ties)
