"""How many workers a tier needs: one rule for what scales a suite and for what explains it.

A tier is the workers of one model with one role. The rule reads what the routers know, which is ahead of what engines
report: reservations exist before a request reaches its worker. It has no state, no clock and no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

TARGET_SHARE = 0.8
"""Share of a worker's sequences, or of its KV blocks, that a tier is scaled to have reserved on average."""

TARGET_PREFILL_STEPS = 2.0
"""Engine steps full of prompt tokens that may be outstanding for each worker on average."""

SCALE_IN_SHARE = 0.85
"""Share of the targets that the load must fit into on fewer workers, so that a tier does not swing around a target."""


@dataclass(frozen=True, slots=True)
class TierLoad:
    """Load of the workers of one model with one role, in total. Capacities are of one worker; 0 means unknown.

    Attributes:
        workers: workers that receive requests.
        starting: workers that were started and do not receive requests yet.
        requests: requests reserved on the workers.
        waiting: requests that wait in the routers because all workers are busy or none exists.
        prefill_tokens: prompt tokens reserved and not computed yet.
        decode_blocks: KV blocks reserved until the requests end.
        max_sequences: concurrent requests of a worker.
        max_batched_tokens: tokens of an engine step.
        total_blocks: KV blocks of a worker.
    """

    workers: int
    starting: int = 0
    requests: float = 0.0
    waiting: float = 0.0
    prefill_tokens: float = 0.0
    decode_blocks: float = 0.0
    max_sequences: float = 0.0
    max_batched_tokens: float = 0.0
    total_blocks: float = 0.0


@dataclass(frozen=True, slots=True)
class Signal:
    """One reason for a number of workers: a total, and how much of it each worker should have.

    As a metric of an autoscaler, `value` is the metric and `per_worker` its target average value.
    """

    name: str
    value: float
    per_worker: float

    @property
    def needed(self) -> float:
        """Workers that this signal asks for, not rounded."""
        return self.value / self.per_worker


@dataclass(frozen=True, slots=True)
class Advice:
    """How many workers a tier should have.

    Attributes:
        workers: the number.
        decisive: the signal that asks for the most workers; None if no signal is known.
        signals: all known ones.
    """

    workers: int
    decisive: Signal | None
    signals: tuple[Signal, ...]


def signals(load: TierLoad) -> tuple[Signal, ...]:
    """Returns the signals whose capacity is known.

    `requests`, `decode_blocks` and `prefill_tokens` compare reservations with the targets. `waiting` is known while
    requests wait: the router has found the workers full with what they have now, which is thus what a worker can have.
    """
    full_at = load.requests / load.workers if load.workers else 0.0
    candidates = (
        Signal("requests", load.requests + load.waiting, TARGET_SHARE * load.max_sequences),
        Signal("decode_blocks", load.decode_blocks, TARGET_SHARE * load.total_blocks),
        Signal("prefill_tokens", load.prefill_tokens, TARGET_PREFILL_STEPS * load.max_batched_tokens),
        Signal("waiting", load.requests + load.waiting, full_at if load.waiting else 0.0),
    )
    return tuple(signal for signal in candidates if signal.per_worker > 0)


def advise(load: TierLoad, min_workers: int = 1, max_workers: int = 0) -> Advice:
    """Returns how many workers a tier should have now.

    A tier grows to what its most demanding signal asks for, and shrinks only to a number on which every signal has room
    to spare. With no known signal the number stays, except that waiting requests get a first worker.

    Args:
        load: as a mean over some seconds; a single reading of a bursty load asks for too much or too little.
        min_workers: fewest workers; with 0, a tier without any request ends at no worker.
        max_workers: most workers; 0: no bound.

    Raises:
        ValueError: a number of the load is negative or not finite, or the bounds contradict each other.
    """
    _check(load, min_workers, max_workers)
    known = signals(load)
    present = load.workers + load.starting
    decisive = max(known, key=lambda signal: signal.needed, default=None)
    if decisive is None:
        wanted = present
    else:
        wanted = _whole(decisive.needed)
        if wanted < present:
            wanted = min(_whole(decisive.needed / SCALE_IN_SHARE), present)
    if load.waiting or load.requests:
        wanted = max(wanted, 1)
    wanted = max(wanted, min_workers)
    return Advice(min(wanted, max_workers) if max_workers else wanted, decisive, known)


def mean_load(loads: Sequence[TierLoad]) -> TierLoad:
    """Returns the mean of several readings of one tier; the workers are those of the last one.

    Raises:
        ValueError: there are no readings.
    """
    if not loads:
        raise ValueError("The load has no readings.")
    amounts = ("requests", "waiting", "prefill_tokens", "decode_blocks")
    means = {name: sum(getattr(load, name) for load in loads) / len(loads) for name in amounts}
    return replace(loads[-1], **means)


def _whole(workers: float) -> int:
    return math.ceil(round(workers, 6))  # a rounding error is no worker


def _check(load: TierLoad, min_workers: int, max_workers: int) -> None:
    for name in TierLoad.__slots__:
        value = getattr(load, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}; it must be a number of at least 0.")
    if min_workers < 0 or max_workers < 0:
        raise ValueError("The fewest and the most workers must be at least 0.")
    if max_workers and max_workers < min_workers:
        raise ValueError(f"The most workers, {max_workers}, are fewer than the fewest, {min_workers}.")
