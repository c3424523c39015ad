"""Faults of processes: they end, stop, slow down, run out of memory, and are restarted in turn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.faults.fault import Scene
from tests.support.faults.host import memory_cgroups
from tests.support.faults.place import REDIS

SUPERVISOR_S = 2.0
"""Until a supervisor has noticed that a process ended, and starts it again."""
SLOW_S, PERIOD_S, SLOWER = 8.0, 0.1, 10
MEMORY_MIB = 64
END_S = 3.0
_HOG = "import sys; sys.stdin.read(); held = []\nwhile True: held.append(b'x' * (1 << 20))"


async def killed(scene: Scene) -> None:
    """Ends a process without a word."""
    await _ended(scene, signal.SIGKILL)


async def terminated(scene: Scene) -> None:
    """Tells a process to end."""
    await _ended(scene, signal.SIGTERM)


async def _ended(scene: Scene, how: signal.Signals) -> None:
    place = scene.place
    if place.moving is not None and scene.victim == REDIS:
        await place.moving.fault("killed")
        await place.moving.heal()
    else:
        await place.end(scene.victim, how)
        await asyncio.sleep(SUPERVISOR_S)
        await place.start_again(scene.victim)
    await place.whole()


def stopped(seconds: float) -> Callable[[Scene], Awaitable[None]]:
    """Returns a fault: a process does nothing for a time."""

    async def inject(scene: Scene) -> None:
        place, began = scene.place, time.monotonic()
        if place.moving is not None and scene.victim == REDIS:
            await place.moving.fault("frozen")
            await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
            await place.moving.heal()
        else:
            place.send_signal(scene.victim, signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)
            finally:
                place.send_signal(scene.victim, signal.SIGCONT)
        await place.whole()

    return inject


async def slowed(scene: Scene) -> None:
    """Lets a process run for a tenth of the time."""
    place, until = scene.place, time.monotonic() + SLOW_S
    try:
        while time.monotonic() < until:
            place.send_signal(scene.victim, signal.SIGSTOP)
            await asyncio.sleep(PERIOD_S * (1 - 1 / SLOWER))
            place.send_signal(scene.victim, signal.SIGCONT)
            await asyncio.sleep(PERIOD_S / SLOWER)
    finally:
        place.send_signal(scene.victim, signal.SIGCONT)
    await place.whole()


async def out_of_memory(scene: Scene) -> None:
    """Fills a control group in which the kernel ends the victim first."""
    place = scene.place
    with _memory_group(MEMORY_MIB) as group:
        hog = await asyncio.to_thread(_start_hog)
        try:
            _share_memory(group, place.pid(scene.victim), hog)
            await place.ended(scene.victim)
        finally:
            hog.kill()
            hog.wait(20)
    await asyncio.sleep(SUPERVISOR_S)
    await place.start_again(scene.victim)
    await place.whole()


def _share_memory(group: Path, victim: int, hog: subprocess.Popen[bytes]) -> None:
    Path(f"/proc/{victim}/oom_score_adj").write_text("1000")  # the first that the kernel ends
    for member in (victim, hog.pid):
        (group / "cgroup.procs").write_text(str(member))
    assert hog.stdin is not None
    hog.stdin.close()


def _start_hog() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _HOG], stdin=subprocess.PIPE)


@contextmanager
def _memory_group(mib: int) -> Iterator[Path]:
    parent = memory_cgroups()
    assert parent is not None
    group = parent / f"sluice-{os.getpid()}"
    group.mkdir()
    try:
        limit = next(group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists())
        limit.write_text(str(mib << 20))
        with contextlib.suppress(OSError):
            (group / "memory.swap.max").write_text("0")
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Removes a control group; a process that is still in it goes on in the one above."""
    deadline = time.monotonic() + END_S
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                (group.parent / "cgroup.procs").write_text(pid)
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


async def restarted_in_turn(scene: Scene) -> None:
    """Restarts every replica of the part, one after the other."""
    await _restart_all(scene, None)


async def upgraded_in_turn(scene: Scene) -> None:
    """Restarts every replica with the code of another tree, and then with this one's."""
    try:
        await _restart_all(scene, scene.other)
        await asyncio.sleep(SUPERVISOR_S)
    finally:
        await _restart_all(scene, None)


async def _restart_all(scene: Scene, tree: Path | None) -> None:
    for name in scene.place.names:
        if name.startswith(scene.part.tier):
            if scene.place.runs(name):  # not if an upgrade was interrupted there
                await scene.place.end(name, signal.SIGTERM)
            await scene.place.start_again(name, tree)
            await scene.place.whole()
