"""Workers of roles that only newer gateways know: nobody is sent to them, and the others are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from services.gateway.workers.registry import WorkerEntry, WorkerRegistry
from sluice.v1 import common_pb2, router_pb2

UP, SYNCED = router_pb2.WorkerChange.KIND_UP, router_pb2.WorkerChange.KIND_SYNCED
NEWER = cast(common_pb2.WorkerRole, 99)


def up(worker_id: str, role: common_pb2.WorkerRole = common_pb2.WORKER_ROLE_AGGREGATED) -> router_pb2.WorkerChange:
    card = common_pb2.ModelCard(model="m")
    worker = router_pb2.WorkerInfo(worker_id=worker_id, address=f"{worker_id}:50061", role=role, card=card)
    return router_pb2.WorkerChange(kind=UP, worker=worker)


class Router:
    """Tells all of it, and then waits."""

    def __init__(self, *changes: router_pb2.WorkerChange) -> None:
        self._changes = changes
        self.stub = self

    def pick(self) -> Router:
        return self

    async def WatchWorkers(self, request: Any) -> AsyncIterator[router_pb2.WorkerChange]:
        for change in self._changes:
            yield change
        await asyncio.Event().wait()


async def test_a_worker_of_an_unknown_role_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[WorkerEntry] = []
    gone: list[str] = []
    router = Router(
        up("a"), up("new", NEWER), up("new", NEWER), up("turned"), up("turned", NEWER), up("b"),
        router_pb2.WorkerChange(kind=SYNCED),
    )  # fmt: skip
    registry = WorkerRegistry(cast(Any, router), seen.append, gone.append)
    running = asyncio.create_task(registry.run())
    async with asyncio.timeout(20):
        while not registry.synced and not running.done():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert not running.done()
    assert list(registry.workers) == ["a", "b"]
    assert gone == ["turned"]
    assert not registry.doubted
    ignored = [each for each in caplog.records if "worker ignored" in each.getMessage()]
    assert [each.__dict__["worker"] for each in ignored] == ["new", "turned"], "each once"
    running.cancel()
