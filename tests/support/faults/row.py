"""One run: a part, a fault, and all loads at once, each of which is a cell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.faults.entrances import Entrances
from tests.support.faults.fault import Fault, Scene
from tests.support.faults.leftovers import Inventory, Left, inventory, left, moves_of
from tests.support.faults.load import DEADLINE_S, Load
from tests.support.faults.outcome import Cell, Reference, full_service, judged
from tests.support.faults.place import Place
from tests.support.waiting import until

BEFORE_S = 3.0
INJECTION_S = 300.0
"""Longest time that a fault takes until it is undone and the suite is whole: upgrades restart three workers twice."""
MAX_AFTER_S = 40.0
"""Longest time that loads go on after that, for those that are not served normally yet."""
POLL_S = 0.2


@dataclass(slots=True)
class Row:
    """What a fault of a part did.

    Attributes:
        problem: why the suite is not whole afterwards; empty: it is.
        healed_s: from the fault until it is undone and the suite whole.
        moved: generations and texts that went on at another replica.
        sentence: why the row is not perfect by nature.
        not_run: why the row could not run; empty: it ran.
        broken: name of the suite, if it was deliberately wrong.
    """

    part: str
    fault: str
    cells: list[Cell] = field(default_factory=list)
    left: Left = field(default_factory=Left)
    healed_s: float = 0.0
    moved: int = 0
    problem: str = ""
    sentence: str = ""
    not_run: str = ""
    broken: str = ""

    @property
    def red(self) -> bool:
        """Whether something happened that must not."""
        if self.not_run:
            return False
        cells = any(not cell.perfect and not cell.sentence for cell in self.cells)
        return cells or bool(self.problem) or (not self.left.nothing and not self.sentence)


async def run_row(scene: Scene, fault: Fault, kinds: Sequence[type[Load]], known: References, seconds: float) -> Row:
    """Runs a fault under loads.

    Args:
        known: the undisturbed answers of the place's loads; missing ones are asked for.
        seconds: for which loads go on, at least, after the fault has been undone.
    """
    place = scene.place
    row = Row(scene.part.name, fault.name)
    await place.whole()
    references = await known.of(await place.open(), kinds)
    await place.close_clients()
    before = await _settled(place)
    moves = await moves_of(place)
    entrances = await place.open()
    entrances.retries = scene.part.retries
    loads = [kind(entrances) for kind in kinds]
    running = [asyncio.create_task(load.run()) for load in loads]
    try:
        await asyncio.sleep(BEFORE_S)
        await until(lambda: all(load.in_progress for load in loads), DEADLINE_S)
        injected = time.monotonic()
        await _inject(scene, fault, row)
        row.healed_s = time.monotonic() - injected
        await asyncio.sleep(seconds)
        await _served(loads, references, injected)
        for load in loads:
            load.stop()
        await asyncio.wait(running, timeout=DEADLINE_S + 5)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await place.close_clients()
    for load in loads:
        cell = Cell(scene.part.name, fault.name, load.name)
        row.cells.append(judged(cell, load.observations, references[load.name], injected))
    row.left = await left(place, before)
    now = await moves_of(place)
    row.moved = sum(max(0, now[key] - moves.get(key, 0)) for key in now)
    return row


async def _inject(scene: Scene, fault: Fault, row: Row) -> None:
    try:
        async with asyncio.timeout(INJECTION_S):
            await fault.inject(scene)
    except Exception as error:
        row.problem = f"the suite is not whole after the fault: {type(error).__name__}: {error}"


async def _served(loads: Sequence[Load], references: Mapping[str, Reference], injected: float) -> None:
    """Waits until every load is served normally again, for a while."""
    deadline = time.monotonic() + MAX_AFTER_S
    while time.monotonic() < deadline:
        if all(_is_served(load, references[load.name], injected) for load in loads):
            return
        await asyncio.sleep(POLL_S)


def _is_served(load: Load, reference: Reference, injected: float) -> bool:
    """Whether a load is served normally, the requests in progress included."""
    seen = [*load.observations, *load.overdue(reference)]
    return full_service(seen, injected, reference) is not None


async def _settled(place: Place) -> Inventory:
    """Returns what is there once the connections of the last run are closed."""
    await asyncio.sleep(3)  # longer than clients and gateways keep idle ones
    return await inventory(place)


class References:
    """The undisturbed answers of a place's loads."""

    def __init__(self) -> None:
        self._known: dict[str, Reference] = {}

    async def of(self, entrances: Entrances, kinds: Sequence[type[Load]]) -> Mapping[str, Reference]:
        """Returns those of some loads; all that are missing are asked for at once, as in a run."""
        missing = [kind(entrances) for kind in kinds if kind.name not in self._known]
        found = await asyncio.gather(*(load.reference() for load in missing))
        self._known |= {load.name: reference for load, reference in zip(missing, found, strict=True)}
        return self._known
