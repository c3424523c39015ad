"""Drift between the book and what workers report."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.router.metrics import Metrics
from services.router.rpc.workers import read_report
from services.router.state.reservations.cost import Load
from services.router.state.store.memory import MemoryStore
from services.router.state.sync.load_reconciler import LoadReconciler, Reported, Reports
from services.router.state.sync.model_state import ModelState
from services.router.state.workers.worker import WorkerRank
from sluice.v1 import common_pb2, router_pb2
from tests.support.servers.routing import Cluster, prompt, worker

AFTER_S = 30.0


def read(report: bytes) -> list[Reported]:
    """A report of tests: R a request that runs, W one whose prompt waits, - for none."""
    text = report.decode()
    return [Reported(len(text.strip("-")), "W" in text)]


class Desk:
    """A store on a clock of the test, with a cluster around it and the drift looked at by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.store = MemoryStore(lambda: int(self.now * 1000))
        self.drift = LoadReconciler(self.store, Reports(read), Metrics(), AFTER_S, lambda: self.now)
        self.cluster = Cluster(store=self.store)

    @property
    def view(self) -> ModelState:
        return self.cluster.router.indexes("m")[0]

    async def book(self, *request_ids: str) -> None:
        for request_id in request_ids:
            await self.cluster.ask(prompt(f"AB{request_id[-1]}"), request_id=request_id, ttl_ms=10**7)

    async def look(self, report: str, after_s: float = 0.0) -> Load:
        self.now += after_s
        await self.store.renew("m", "a", self.cluster.attachments["m", "a"].session, 10**9, report.encode())
        self.view.take(await self.store.pulse("m"))
        await self.drift.correct(self.view)
        self.view.take(await self.store.pulse("m"))
        return self.view.loads.get(WorkerRank("a", 0), Load())


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    made = Desk()
    async with made.cluster as cluster:
        await cluster.add(worker("a", ranks=1))
        yield made


async def test_a_book_that_agrees_is_left_alone(desk: Desk) -> None:
    await desk.book("r1", "r2", "r3")
    for _ in range(10):
        assert (await desk.look("WWR", 10)).requests == 3


async def test_leaked_reservations_are_given_back_once_they_are_old(desk: Desk) -> None:
    await desk.book("leak1", "leak2")
    await desk.book("live3")
    assert (await desk.look("W", 1)).requests == 3
    assert (await desk.look("W", AFTER_S - 2)).requests == 3, "not old enough"
    assert (await desk.look("W", 3)).requests == 1
    assert await desk.cluster.router.lifecycle.free(["m:leak1", "m:leak2", "m:live3"]) == 2


async def test_young_reservations_are_on_their_way(desk: Desk) -> None:
    for number in range(6):
        await desk.book(f"r{number}")
        assert (await desk.look("-", AFTER_S / 2)).requests >= 1, "the youngest is never touched"


async def test_unmarked_prompts_count_as_computed_when_none_waits(desk: Desk) -> None:
    await desk.book("r1", "r2")
    before = await desk.look("RR", 1)
    assert before.prefill > 0
    assert (await desk.look("RW", AFTER_S + 1)).prefill == before.prefill
    await desk.look("RR")
    after = await desk.look("RR", AFTER_S + 1)
    assert (after.prefill, after.decode, after.requests) == (0, before.decode, 2)


async def test_a_surplus_that_goes_away_by_itself_starts_anew(desk: Desk) -> None:
    await desk.book("r1")
    await desk.look("-", 1)
    await desk.look("W", AFTER_S)
    assert (await desk.look("-", 1)).requests == 1, "seen for the first time again"
    assert (await desk.look("-", AFTER_S + 1)).requests == 0


async def test_a_worker_that_reports_nothing_is_not_corrected(desk: Desk) -> None:
    await desk.book("r1")
    desk.now += 10 * AFTER_S
    desk.view.take(await desk.store.pulse("m"))
    await desk.drift.correct(desk.view)
    assert (await desk.store.pulse("m")).loads[WorkerRank("a", 0)].requests == 1


def test_reports_are_read_by_rank() -> None:
    beat = router_pb2.Heartbeat(
        loads=[
            common_pb2.WorkerLoad(running_requests=2, waiting_requests=1),
            common_pb2.WorkerLoad(running_requests=1, prefill_tokens=7, used_blocks=9),
            common_pb2.WorkerLoad(running_requests=3),
        ]
    )
    assert read_report(beat.SerializeToString()) == [Reported(3, True), Reported(1, True, 9), Reported(3, False)]
    assert read_report(b"") == []
