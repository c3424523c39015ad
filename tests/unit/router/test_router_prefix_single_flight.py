"""Decisions about the same new prefix wait for the first of them, within one bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from services.router.scheduling import prefix_single_flight
from services.router.scheduling.prefix_single_flight import PrefixSingleFlight
from services.router.state.kv_index.index import Overlap
from services.router.state.workers.worker import WorkerRank

HASHES = (1, 2, 3, 4, 5)
STEP_S = 0.15


def view(depths: Sequence[int]) -> Any:
    """Returns a model state in which the prompt's overlap takes these values in turn, then stays."""
    left = list(depths)

    def match(hashes: Sequence[int]) -> Mapping[WorkerRank, Overlap]:
        return {WorkerRank("w", 0): Overlap(left.pop(0) if len(left) > 1 else left[0])}

    return SimpleNamespace(model="m", match=match)


async def test_decision_behind_several_prefixes_waits_no_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_single_flight, "MAX_WAIT_S", 1.5 * STEP_S)
    flight = PrefixSingleFlight()

    async def decide(depth: int) -> None:
        async with flight.matched(view([depth]), HASHES, wait=True):
            await asyncio.sleep(STEP_S * (depth + 1))

    async with asyncio.TaskGroup() as others:
        for depth in range(4):
            others.create_task(decide(depth))
        await asyncio.sleep(0)
        began = time.monotonic()
        async with flight.matched(view([0, 1, 2, 3]), HASHES, wait=True) as overlaps:
            waited_s = time.monotonic() - began
    assert 1.4 * STEP_S < waited_s < 2.5 * STEP_S
    assert overlaps == {WorkerRank("w", 0): Overlap(1)}
