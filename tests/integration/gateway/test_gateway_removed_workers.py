"""Workers that no router lists any more: those whose process has stopped lose their requests, all others keep them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import TaskOwner
from services.common.rpc.health import Health
from services.gateway.backends.workers import connections
from services.gateway.core.request import StopParams
from services.gateway.streams import watchdog
from services.gateway.streams.watchdog import WorkerWatchdog
from services.worker.serving.worker import Worker
from tests.support.servers.survival import Stage, asking, staged
from tests.support.waiting import until

RESPONSE_S = 1.0
STEPS: dict[str, Any] = {"engine_args": "timing=fixed,fixed_step_ms=10", "speedup": 1.0}
STORY = asking("story", "Tell me of rivers.", stop=StopParams(max_tokens=200, ignore_eos=True))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "CHECK_EVERY_S", 0.1)
    monkeypatch.setattr(watchdog, "RESPONSE_S", RESPONSE_S)
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set it, and no health check is answered any more, as by stopped processes."""
    check, event = Health.Check, asyncio.Event()

    async def answer(self: Health, request: Any, context: Any) -> Any:
        if event.is_set():
            await asyncio.Event().wait()
        return await check(self, request, context)

    monkeypatch.setattr(Health, "Check", answer)
    return event


@asynccontextmanager
async def checked(stage: Stage) -> AsyncIterator[list[int]]:
    """Checks removed workers; yields a list that grows with every worker given up."""
    given_up: list[int] = []
    tasks = TaskOwner()
    links = stage.pipeline.connections
    tasks.spawn(WorkerWatchdog(lambda: links.workers, 0, lambda: given_up.append(1), tasks).run(), "removed")
    try:
        yield given_up
    finally:
        await tasks.close()


async def hang(stage: Stage) -> None:
    await stage.hosts[0].worker.engine.control("inject_fault", {"fault": "hang"})


def remove(stage: Stage) -> None:
    """Removes the first worker as a router does that receives no heartbeat from it."""
    stage.reservations.order.remove("w0")
    stage.pipelines.registry._down("w0")


async def test_generations_of_a_removed_worker_that_does_not_respond_move(folder: Path, stopped: asyncio.Event) -> None:
    async with staged(folder, **STEPS) as stage, checked(stage) as given_up:
        expected = await stage.ask(STORY)
        asked = asyncio.create_task(stage.ask(STORY))
        await until(lambda: stage.hosts[0].worker.live_requests == 1)
        await hang(stage)
        stopped.set()
        remove(stage)
        observed = await asyncio.wait_for(asked, 20)
        assert observed.comparable == expected.comparable
        assert observed.finish is not None
        assert observed.finish.migrations == 1
        assert given_up == [1]
        await until(lambda: [link.worker_id for link in stage.pipeline.connections.workers] == ["w1"])


async def test_generations_of_a_removed_worker_that_responds_stay(folder: Path) -> None:
    async with staged(folder, **STEPS) as stage, checked(stage) as given_up:
        asked = asyncio.create_task(stage.ask(STORY))
        await until(lambda: stage.hosts[0].worker.live_requests == 1)
        await hang(stage)  # silent like a long prefill
        remove(stage)
        await asyncio.sleep(3 * RESPONSE_S)
        assert stage.hosts[0].worker.live_requests == 1
        await stage.hosts[0].worker.engine.control("inject_fault", {"fault": "none"})
        observed = await asyncio.wait_for(asked, 20)
        assert observed.finish is not None
        assert observed.finish.migrations == 0
        assert given_up == []


async def test_generations_of_a_removed_worker_that_sends_tokens_stay(folder: Path, stopped: asyncio.Event) -> None:
    long = asking("long", "Go on.", stop=StopParams(max_tokens=400, ignore_eos=True))
    async with staged(folder, **STEPS) as stage, checked(stage) as given_up:
        asked = asyncio.create_task(stage.ask(long))
        await until(lambda: stage.hosts[0].worker.live_requests == 1)
        stopped.set()
        remove(stage)
        observed = await asyncio.wait_for(asked, 20)
        assert observed.finish is not None
        assert observed.finish.migrations == 0
        assert given_up == []


@pytest.mark.parametrize("kind", ["UNAUTHENTICATED", "PERMISSION_DENIED", "CANCELLED"])
async def test_an_error_that_the_only_worker_repeats_reaches_its_client_at_once(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise SluiceError(ErrorKind[kind], "No.")

    async with staged(folder, workers=1, **STEPS) as stage:
        monkeypatch.setattr(Worker, "submit", refuse)
        observed = await asyncio.wait_for(stage.ask(STORY), 5)
        assert observed.error is not None
        assert observed.error.code in ("peer_refused", "peer_cancelled")
        assert observed.error.http_status == 503
        await stage.quiet()
