"""Routers of others in place of the gateway's, written with `sluice.stages` alone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, cast

import pytest

from services.gateway.core.request import Score
from sluice.stages import (
    Components,
    PipelineConfig,
    PlacementRequest,
    Route,
    SluiceError,
    WorkerEntry,
    WorkerRouter,
    overloaded,
    unavailable,
)
from tests.support.servers.survival import Stage, asking, staged

OWN = PipelineConfig(stages={"route": "own_routers:Ledger"})
NARROWING = PipelineConfig(stages={"route": "own_routers:MostCached"})


class Ledger:
    """A router with reservations of its own: the worker with the fewest of them, and one request each."""

    made: ClassVar[list[str]] = []
    computed: ClassVar[list[str]] = []
    held: ClassVar[dict[str, str]] = {}

    def __init__(self, components: Components) -> None:
        self.asked: list[PlacementRequest] = []

    async def route(self, wanted: PlacementRequest, workers: Sequence[WorkerEntry]) -> Route:
        free = [worker.worker_id for worker in workers if worker.worker_id not in self.held.values()]
        if not free:
            raise overloaded("Each worker runs a request.")
        if not wanted.book:
            return Route(free[0])
        self.made.append(wanted.reservation)
        self.held[wanted.reservation] = free[0]
        return Route(free[0], reservation_id=wanted.reservation, reservations=self)

    def prefill_complete(self, reservation_id: str) -> None:
        self.computed.append(reservation_id)

    def free(self, reservation_id: str, cached_tokens: int | None = None, output_tokens: int = 0) -> None:
        del self.held[reservation_id]


class MostCached:
    """Reads the overlaps of all workers, and has the gateway's router reserve on the one with most of the prompt."""

    scores: ClassVar[list[Sequence[Score]]] = []

    def __init__(self, components: Components) -> None:
        self._router: WorkerRouter = components.router

    async def route(self, wanted: PlacementRequest, workers: Sequence[WorkerEntry]) -> Route:
        seen = await self._router.route(replace(wanted, book=False, explain=True), workers)
        self.scores.append(seen.scores)
        best = max(seen.scores, key=lambda score: score.overlap[0])
        return await self._router.route(wanted, [one for one in workers if one.worker_id == best.worker])


@pytest.fixture(autouse=True)
def routers(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("own_routers")
    module.Ledger, module.MostCached = Ledger, MostCached
    monkeypatch.setitem(sys.modules, "own_routers", module)
    Ledger.made, Ledger.computed, Ledger.held, MostCached.scores = [], [], {}, []


async def test_router_of_others_is_told_of_its_reservations_alone(folder: Path) -> None:
    async with staged(folder, config=OWN) as stage:
        heard = await asyncio.gather(*(stage.ask(asking(f"r{number}", "Tell me of rivers.")) for number in range(2)))
        assert all(one.finish is not None for one in heard)
        await stage.quiet()
        assert sorted(Ledger.made) == sorted(Ledger.computed) == ["r0-0", "r1-0"]
        assert not Ledger.held
        assert stage.reservations.made == 0


async def test_reservation_of_others_follows_the_generation_to_another_worker(folder: Path) -> None:
    async with staged(folder, config=OWN) as stage:
        stage.knives[0].set(3)
        heard = await stage.ask(asking("moved", "Tell me of a long journey."))
        assert heard.finish is not None
        assert heard.finish.migrations == 1
        await stage.quiet()
        assert Ledger.made == ["moved-0", "moved-0-m1"]
        assert Ledger.computed[-1] == "moved-0-m1"
        assert not Ledger.held


async def test_refusal_of_others_is_the_answer(folder: Path) -> None:
    async with staged(folder, workers=1, config=OWN) as stage:
        Ledger.held["other"] = "w0"
        with pytest.raises(SluiceError, match="Each worker runs"):
            await stage.ask(asking("refused", "Hi."))


async def test_route_of_others_that_is_no_pair_is_refused_where_one_is_required(folder: Path) -> None:
    async with staged(folder, workers=1, config=replace(OWN, disaggregation="require")) as stage:
        with pytest.raises(SluiceError) as raised:
            await stage.ask(asking("lone", "Hi."))
        assert raised.value.code == "no_prefill_workers"
        assert Ledger.made == ["lone-0"]
        assert not Ledger.held


async def test_second_attempt_has_an_id_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(folder, config=OWN) as stage:
        link = stage.pipeline.connections.worker("w0")
        monkeypatch.setattr(link, "ready", _refuses)
        await stage.ask(asking("twice", "Hi."))
        await stage.quiet()
        assert Ledger.made == ["twice-0", "twice-0-1"]
        assert not Ledger.held


async def test_stage_sees_overlaps_and_reserves_with_the_gateways_router(folder: Path) -> None:
    async with staged(folder, config=NARROWING) as stage:
        _explain(stage)
        heard = await stage.ask(asking("r", "Tell me of rivers."))
        assert heard.finish is not None
        assert [[score.overlap[0] for score in seen] for seen in MostCached.scores] == [[0, 7]]
        assert stage.reservations.last == ("", "w1")
        assert stage.reservations.made == 1
        await stage.quiet()


async def _refuses(*_: Any) -> None:
    raise unavailable("The worker cannot be reached.")


def _explain(stage: Stage) -> None:
    """Has the router service's stand-in answer with scores where a query asks for them."""
    route = stage.reservations.route

    async def explained(*arguments: Any, **more: Any) -> Route:
        answer = await route(*arguments, **more)
        names = stage.reservations.order
        scores = tuple(Score(name, 0, 0.0, (7 * place, 0, 0), 0, 0, 0) for place, name in enumerate(names))
        return replace(answer, scores=scores) if more["explain"] else answer

    cast(Any, stage.reservations).route = explained
