"""`sluice advise`: how many workers each tier of a running suite should have now, and why."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape

from services.common.types.scaling import SCALE_IN_SHARE, Advice, Signal, TierLoad, advise, mean_load
from sluice.cli.errors import BadFlag
from sluice.cli.live.client import reached
from sluice.cli.live.endpoint import Endpoint
from sluice.cli.sizing.tiers import WorkerTier, tier_loads

READ_EVERY_S = 1.0
MAX_SECONDS = 600.0
"""Seconds over which readings may be averaged."""
MEANINGS = {
    "requests": "requests reserved or waiting, and a worker should have {:g}",
    "decode_blocks": "KV blocks reserved, and a worker should have {:g}",
    "prefill_tokens": "prompt tokens to compute, and a worker should have {:g}",
    "waiting": "requests reserved or waiting, and the workers are full with {:g} each",
}
"""What each signal of the rule says: its value, and its target for a worker."""


class TierAdvice(NamedTuple):
    """What the rule says of one tier."""

    tier: WorkerTier
    load: TierLoad
    advice: Advice

    @property
    def change(self) -> int:
        """Workers to add; negative: to remove."""
        return self.advice.workers - self.load.workers - self.load.starting

    def as_json(self) -> dict[str, Any]:
        """Returns the advice for scripts."""
        decisive = self.advice.decisive
        return {
            **self.tier._asdict(),
            "workers": self.load.workers,
            "advised": self.advice.workers,
            "why": why(self),
            "decisive": None if decisive is None else decisive.name,
            "signals": [{**asdict(signal), "needed": signal.needed} for signal in self.advice.signals],
            "load": asdict(self.load),
        }


def why(given: TierAdvice) -> str:
    """Returns the reason for the number as a sentence."""
    load, advice = given.load, given.advice
    decisive = advice.decisive
    if decisive is None:
        if advice.workers > load.workers:
            return f"{load.waiting:g} requests wait and no worker exists."
        return "The workers state no capacity, so the number stays."
    reason = _measured(decisive)
    if given.change > 0:
        return f"{reason}: {decisive.needed:.1f} workers."
    if given.change < 0:
        return f"{reason}: {decisive.needed:.1f} workers, which leaves room to spare on {advice.workers}."
    if decisive.needed > advice.workers:
        return f"{reason}: {decisive.needed:.1f} workers, more than are allowed."
    if decisive.needed <= advice.workers - 1:
        return f"{reason}: {decisive.needed:.1f} workers, and one fewer would be filled to over {SCALE_IN_SHARE:.0%}."
    return f"{reason}: {decisive.needed:.1f} workers."


def _measured(signal: Signal) -> str:
    return f"{signal.value:,.0f} {MEANINGS[signal.name].format(signal.per_worker)}"


def advised(
    readings: Sequence[Mapping[WorkerTier, TierLoad]], min_workers: int, max_workers: int
) -> Sequence[TierAdvice]:
    """Returns the advice for every tier of the last reading, on the mean of the readings that have it.

    Args:
        max_workers: 0: no bound.
    """
    found = []
    for tier in readings[-1]:
        load = mean_load([reading[tier] for reading in readings if tier in reading])
        found.append(TierAdvice(tier, load, advise(load, min_workers, max_workers)))
    return found


def run(endpoint: Endpoint, seconds: float, min_workers: int, max_workers: int, as_json: bool, console: Console) -> int:
    """Reads the load, once a second, and prints the advice; returns exit code 0.

    Raises:
        BadFlag: a number makes no sense.
        NotReached: the suite cannot be reached.
    """
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_SECONDS):
        raise BadFlag(f"--seconds is {seconds:g}; it must be above 0 and at most {MAX_SECONDS:g}")
    if min_workers < 0 or max_workers < 0:
        raise BadFlag("--min-workers and --max-workers must be at least 0")
    if max_workers and max_workers < min_workers:
        raise BadFlag(f"--max-workers is {max_workers}, less than --min-workers, {min_workers}")
    found = advised(asyncio.run(_read(endpoint, seconds)), min_workers, max_workers)
    if as_json:
        print(json.dumps([given.as_json() for given in found]))
    elif not found:
        console.print("No worker has registered with the router and no request waits; start one with `sluice worker`.")
    for given in () if as_json else found:
        console.print(f"{escape(given.tier.model)}, {given.tier.role}: {_verdict(given)}. {why(given)}")
    return 0


def _verdict(given: TierAdvice) -> str:
    present = given.load.workers + given.load.starting
    if not given.change:
        return f"keep {present}"
    return f"{'add' if given.change > 0 else 'remove'} {abs(given.change)}, {present} → {given.advice.workers}"


async def _read(endpoint: Endpoint, seconds: float) -> Sequence[Mapping[WorkerTier, TierLoad]]:
    async with reached(endpoint) as running:
        readings = [await tier_loads(running)]
        for _ in range(math.ceil(seconds / READ_EVERY_S) - 1):
            await asyncio.sleep(READ_EVERY_S)
            readings.append(await tier_loads(running))
        return readings
