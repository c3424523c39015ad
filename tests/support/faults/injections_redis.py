"""Faults of Redis: its disk is full, it loses its data, its master moves."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import psutil
from redis import Redis

from tests.support.faults.fault import Scene
from tests.support.faults.injections_processes import SUPERVISOR_S
from tests.support.faults.place import REDIS

FULL_S = 5.0


async def disk_full(scene: Scene) -> None:
    """Fills the disk of Redis for a time; a Redis that ends because of it is started again with room."""
    place = scene.place
    ballast = place.redis_home / "ballast"
    process = psutil.Process(place.pid(REDIS))
    await asyncio.to_thread(_fill, ballast)
    try:
        await asyncio.sleep(FULL_S)
    finally:
        ballast.unlink()
    if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
        await place.ended(REDIS)
        await asyncio.sleep(SUPERVISOR_S)
        await place.start_again(REDIS)
    await place.whole()


def _fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            continue


async def emptied(scene: Scene) -> None:
    """Deletes everything that Redis holds."""
    await asyncio.to_thread(_flush, scene)
    await asyncio.sleep(SUPERVISOR_S)
    await scene.place.whole()


def _flush(scene: Scene) -> None:
    server = scene.place.redis if scene.place.moving is None else scene.place.moving.master()
    with Redis(host=server.host, port=server.port, protocol=2) as client:
        client.flushall()


async def moved(scene: Scene) -> None:
    """Lets the replica of the master take over, as planned."""
    assert scene.place.moving is not None
    await scene.place.moving.fault("planned")
    await scene.place.moving.heal()
    await scene.place.whole()
