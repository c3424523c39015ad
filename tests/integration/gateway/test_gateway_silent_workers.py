"""Workers whose engine hangs in a healthy process: their generations go on elsewhere, and nothing new goes there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.common.base.tasks import TaskOwner
from services.gateway.core.request import StopParams
from services.gateway.streams.migration import MigrationPolicy
from services.gateway.streams.watchdog import WorkerWatchdog
from tests.support.servers.survival import Stage, asking, staged
from tests.support.waiting import until

SILENCE_S = 3.0
STEPS: dict[str, Any] = {"engine_args": "timing=fixed,fixed_step_ms=10", "speedup": 1.0}


@asynccontextmanager
async def watched(stage: Stage) -> AsyncIterator[list[int]]:
    """Silence is looked for; gives a list that grows with every worker given up."""
    given_up: list[int] = []
    pipeline = stage.pipeline
    tasks = TaskOwner()
    silent = WorkerWatchdog(lambda: pipeline.connections.workers, SILENCE_S, lambda: given_up.append(1), tasks)
    tasks.spawn(silent.run(), "watchdog")
    try:
        yield given_up
    finally:
        await tasks.close()


async def fault(stage: Stage, name: str, worker: int = 0) -> None:
    await stage.hosts[worker].worker.engine.control("inject_fault", {"fault": name})


def stories(count: int) -> list[Any]:
    stop = StopParams(max_tokens=300, ignore_eos=True)
    return [asking(f"r{number}", f"Tell me of number {number}.", stop=stop) for number in range(count)]


async def test_generations_of_a_hung_worker_go_on_elsewhere_and_nobody_can_tell(folder: Path) -> None:
    requests = stories(8)
    async with staged(folder, **STEPS) as stage, watched(stage) as given_up:
        told = [one.text for one in await asyncio.gather(*(stage.ask(request) for request in requests))]
        asked = [asyncio.create_task(stage.ask(request)) for request in requests]
        await until(lambda: stage.hosts[0].worker.live_requests == len(requests))
        await asyncio.sleep(0.3)
        await fault(stage, "hang")
        heard = await asyncio.gather(*asked)
        assert [one.text for one in heard] == told
        assert {one.finish.migrations for one in heard if one.finish is not None} == {1}
        assert len(given_up) == 1
        assert not stage.pipeline.connections.sound("w0")
        later = await stage.ask(asking("later", "Tell me of boats."))
        assert later.finish is not None
        assert later.finish.migrations == 0, "it was sent to the worker that hangs"
        await fault(stage, "none")
        await stage.quiet()


async def test_a_worker_with_nothing_to_say_or_with_others_to_speak_of_is_left_alone(folder: Path) -> None:
    async with staged(folder, max_sequences=1, **STEPS) as stage, watched(stage) as given_up:
        await asyncio.sleep(2 * SILENCE_S)  # nothing to do
        long = asking("long", "Go on.", stop=StopParams(max_tokens=400, ignore_eos=True))
        heard = await asyncio.gather(stage.ask(long), stage.ask(asking("waits", "Tell me of gates.")))
        assert [one.finish.migrations for one in heard if one.finish is not None] == [0, 0]
        assert given_up == []
        await stage.quiet()


async def test_without_migration_a_hung_worker_is_an_error(folder: Path) -> None:
    async with staged(folder, policy=MigrationPolicy(enabled=False), **STEPS) as stage, watched(stage):
        asked = asyncio.create_task(stage.ask(stories(1)[0]))
        await until(lambda: stage.hosts[0].worker.live_requests == 1)
        await fault(stage, "hang")
        heard = await asked
        assert heard.error is not None
        assert heard.error.http_status == 502
        await fault(stage, "none")
        await stage.quiet()


async def test_it_is_trusted_again_when_it_begins_a_generation(folder: Path) -> None:
    async with staged(folder, workers=1, policy=MigrationPolicy(wait_s=0.2), **STEPS) as stage, watched(stage):
        asked = asyncio.create_task(stage.ask(stories(1)[0]))
        await until(lambda: stage.hosts[0].worker.live_requests == 1)
        await fault(stage, "hang")
        assert (await asked).error is not None
        assert not stage.pipeline.connections.sound("w0")
        await fault(stage, "none")
        await until(lambda: stage.pipeline.connections.connected_workers == 1)
        assert (await stage.ask(asking("trial", "Tell me of mills."))).finish is not None  # better than no worker
        assert stage.pipeline.connections.sound("w0")
        await stage.quiet()
