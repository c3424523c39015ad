"""A request that waited in line for nothing is gone when it has heard so."""

from __future__ import annotations

from contextlib import suppress

from services.common.tasks import TaskOwner
from services.router.reservations.table import AllBusy
from services.router.scheduling.admission_queue import AdmissionQueues
from tests.support.oracles.circles import circles_of

TIMES = 20


async def refuse(*, place: bool = True) -> int:
    raise AllBusy


async def nobody(found: int) -> None:
    pass


async def test_refused_after_a_wait_in_line() -> None:
    tasks = TaskOwner()
    queues: AdmissionQueues[int] = AdmissionQueues(tasks, 100, nobody)

    async def wait() -> None:
        with suppress(AllBusy):
            await queues.admit("m", refuse, max_wait_ms=20)

    found = await circles_of(wait, TIMES)
    assert found.total() < TIMES, found
    await tasks.close()
