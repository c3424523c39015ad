"""Reports of picked requests: many at a time, and twice where the store may run a query after its cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from services.router.picker.releases import Releases
from services.router.scheduling.decisions import Outcome
from tests.support.waiting import until


class Lifecycle:
    """Records the reports."""

    def __init__(self) -> None:
        self.computed: list[str] = []
        self.freed: list[str] = []
        self.outcomes: list[Outcome] = []
        self.calls = 0

    async def mark_prefill_complete(self, reservations: Sequence[str]) -> int:
        self.calls += 1
        self.computed += reservations
        return 0

    async def free(self, reservations: Sequence[str], outcomes: Sequence[Outcome] = ()) -> int:
        self.calls += 1
        self.freed += reservations
        self.outcomes += outcomes
        return 0


@pytest.fixture
def lifecycle() -> Lifecycle:
    return Lifecycle()


@pytest.fixture
async def releases(lifecycle: Any) -> AsyncIterator[Releases]:
    made = Releases(lifecycle, store_timeout_s=0.25)
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()


async def test_reports_of_many_requests_are_one_call_of_each_kind(releases: Releases, lifecycle: Lifecycle) -> None:
    outcome = Outcome("r1", 3, 4)
    for number in range(100):
        releases.prefill_complete(f"r{number}")
    for number in range(50):
        releases.free(f"r{number}", outcome if number == 1 else None)
    await releases.flush(20)
    assert lifecycle.calls == 2
    assert set(lifecycle.computed) == {f"r{number}" for number in range(50, 100)}
    assert (len(lifecycle.freed), lifecycle.outcomes) == (50, [outcome])


async def test_booking_of_a_cancelled_query_is_freed_again_after_the_time_limit_of_the_store(
    releases: Releases, lifecycle: Lifecycle
) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    releases.abandon("r")
    await releases.flush(20)
    assert lifecycle.freed == ["r"]

    async def again() -> bool:
        return lifecycle.freed == ["r", "r"]

    await until(again)
    assert loop.time() - started > 0.25
