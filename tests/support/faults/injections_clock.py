"""A fault of the clock: a process' time of day is wrong for a while, in either direction."""

from __future__ import annotations

import asyncio

from tests.support.faults.fault import Scene
from tests.support.faults.place import REDIS

WRONG_BY_S = 600
WRONG_FOR_S = 9.0
"""In each direction."""


async def wrong(scene: Scene) -> None:
    """Sets a clock ten minutes ahead, then ten minutes behind, then right."""
    clocks = scene.place.clocks
    assert clocks is not None
    name, pid = _clock_of(scene)
    assert clocks.has_own(pid), f"{name} has no clock of its own"
    try:
        for seconds in (WRONG_BY_S, -WRONG_BY_S):
            clocks.move(name, seconds)
            await asyncio.sleep(WRONG_FOR_S)
    finally:
        clocks.move(name, 0)
    await scene.place.whole()


def _clock_of(scene: Scene) -> tuple[str, int]:
    """Returns the name of the victim's clock and its process id; where masters move, those of the present one."""
    moving = scene.place.moving
    if moving is None or scene.victim != REDIS:
        return scene.victim, scene.place.pid(scene.victim)
    master = moving.master()
    return master.home.name, master.pid
