"""The faults: what each does to a process and how it is undone."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.faults.host import Host
from tests.support.faults.parts import Part
from tests.support.faults.place import Place

SUPERVISOR_S = 2.0
"""Until a supervisor has noticed that a process ended, and starts it again."""
SLOW_S, PERIOD_S, SLOWER = 8.0, 0.1, 10


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a fault happens.

    Attributes:
        other: another source tree, for upgrades.
    """

    place: Place
    part: Part
    other: Path | None = None

    @property
    def victim(self) -> str:
        """The process that is disturbed."""
        return self.part.victim


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault.

    Attributes:
        inject: lets it happen and undoes it; returns when it is undone.
        needs: of the machine, as in host.NEEDS.
        parts: to which it can happen; empty: to all.
        missing: why this tool cannot let it happen; empty: it can.
    """

    name: str
    about: str
    inject: Callable[[Scene], Awaitable[None]] | None = None
    needs: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    missing: str = ""

    def not_run(self, part: Part, host: Host, has_other: bool) -> str:
        """Returns why the fault cannot happen to a part here; nothing: it can."""
        if self.name == "rolling-upgrade" and not has_other:
            return "needs a second source tree: --other TREE"
        return part.missing or self.missing or host.lacks(*self.needs)

    def concerns(self, part: Part) -> bool:
        """Whether the fault can happen to a part at all."""
        return not self.parts or part.name in self.parts


async def killed(scene: Scene) -> None:
    await _ended(scene, signal.SIGKILL)


async def terminated(scene: Scene) -> None:
    await _ended(scene, signal.SIGTERM)


async def _ended(scene: Scene, how: signal.Signals) -> None:
    await scene.place.end(scene.victim, how)
    await asyncio.sleep(SUPERVISOR_S)
    await scene.place.start_again(scene.victim)
    await scene.place.whole()


def stopped(seconds: float) -> Callable[[Scene], Awaitable[None]]:
    """Returns a fault: a process does nothing for a time."""

    async def inject(scene: Scene) -> None:
        scene.place.signal(scene.victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            scene.place.signal(scene.victim, signal.SIGCONT)
        await scene.place.whole()

    return inject


async def slowed(scene: Scene) -> None:
    """Lets a process run for a tenth of the time."""
    loop = asyncio.get_running_loop()
    until = loop.time() + SLOW_S
    try:
        while loop.time() < until:
            scene.place.signal(scene.victim, signal.SIGSTOP)
            await asyncio.sleep(PERIOD_S * (1 - 1 / SLOWER))
            scene.place.signal(scene.victim, signal.SIGCONT)
            await asyncio.sleep(PERIOD_S / SLOWER)
    finally:
        scene.place.signal(scene.victim, signal.SIGCONT)
    await scene.place.whole()


async def restarted_in_turn(scene: Scene) -> None:
    """Restarts every replica of the part, one after the other."""
    await _restart_all(scene, None)


async def upgraded_in_turn(scene: Scene) -> None:
    """Restarts every replica with the code of another tree, and later with this one's."""
    await _restart_all(scene, scene.other)
    await asyncio.sleep(SUPERVISOR_S)
    await _restart_all(scene, None)


async def _restart_all(scene: Scene, tree: Path | None) -> None:
    for name in scene.place.names:
        if name.startswith(scene.part.tier):
            await scene.place.end(name, signal.SIGTERM)
            await scene.place.start_again(name, tree)
            await scene.place.whole()


FAULT_KINDS = (
    Fault("sigkill", "SIGKILL; started again after 2 s", killed),
    Fault("sigterm", "SIGTERM; started again 2 s after its end", terminated),
    Fault("sigstop-5s", "SIGSTOP for 5 s", stopped(5)),
    Fault("sigstop-60s", "SIGSTOP for 60 s", stopped(60)),
    Fault("ten-times-slower", "runs a tenth of the time, in slices of 10 ms, for 8 s", slowed),
    Fault("rolling-restart", "SIGTERM to every replica, one after the other", restarted_in_turn),
    Fault(
        "rolling-upgrade", "every replica restarted with another version and back, one by one", upgraded_in_turn
    ),
    Fault("clock-10min", "the clock ten minutes off", missing="no process here can be given a clock of its own"),
    Fault("certificate-expired", "its certificate expires while it runs", missing="the suite of this tool has no TLS"),
    Fault("token-rotated", "its token is replaced", missing="the suite of this tool has no tokens"),
)
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in FAULT_KINDS}
