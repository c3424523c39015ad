"""Rigs of the router's steps: lists of workers, queues of requests, and rounds over models and workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

from services.common.base.errors import SluiceError, internal
from services.common.base.tasks import TaskOwner
from services.common.types.generation import Role
from services.router.registration.manager import WorkerManager
from services.router.rpc.workers import changes_of, worker_infos
from services.router.scheduling.admission_queue import AdmissionQueues, WaitTerms, no_workers
from services.router.state.sync.synchronizer import IndexSynchronizer
from services.router.state.workers.registry import UpdateKind, WorkerUpdate
from services.router.state.workers.worker import Worker
from sluice.v1 import router_pb2
from tests.support.shared_steps.rigs import ROWS, Fault, Outcome, rig


def _left_out() -> SluiceError:
    return internal("The worker was left out.")


def _worker(row: int, document: bytes) -> Worker:
    return Worker(f"w{row}", f"w{row}:1", 1, "m", Role.AGGREGATED, 16, "scheme", 10, 1, document)


def _lists(fault: Fault, send: Callable[[list[Worker], Callable[[Worker], bytes]], list[Any]]) -> Outcome:
    """Sends a list of workers, of which one has a record, or a heartbeat, that cannot be sent."""
    workers = []
    for row in range(ROWS):
        document = router_pb2.WorkerInfo(worker_id=f"w{row}").SerializeToString()
        workers.append(_worker(row, b"\xff" if fault.due(row) else document))

    def report(worker: Worker) -> bytes:
        fault.at(workers.index(worker))
        return b""

    outcome = Outcome({int(info.worker_id[1:]): info.SerializeToString() for info in send(workers, report)})
    outcome.errors = {row: _left_out() for row in range(ROWS) if row not in outcome.outputs}
    return outcome


@rig("router.worker_list")
def worker_list(fault: Fault) -> Outcome:
    return _lists(fault, lambda workers, report: list(worker_infos(workers, report)))


@rig("router.worker_changes")
def worker_changes(fault: Fault) -> Outcome:
    def send(workers: list[Worker], report: Callable[[Worker], bytes]) -> list[Any]:
        updates = [*(WorkerUpdate(UpdateKind.UP, worker) for worker in workers), WorkerUpdate(UpdateKind.SYNCED, None)]
        *changes, synced = changes_of(updates, report)
        assert synced.kind == router_pb2.WorkerChange.KIND_SYNCED
        return [change.worker for change in changes]

    return _lists(fault, send)


@rig("router.admission")
async def admission(fault: Fault) -> Outcome:
    deaths: list[str] = []
    abandoned: list[Any] = []
    tasks = TaskOwner(lambda name, error: deaths.append(name))

    async def abandon(placed: Any) -> None:
        abandoned.append(placed)

    queues: AdmissionQueues[str] = AdmissionQueues(tasks, 1_000, abandon)
    free = asyncio.Event()
    outcome = Outcome()

    async def ask(row: int) -> None:
        async def attempt(*, place: bool = True) -> str:
            if not free.is_set():
                raise no_workers("m")
            fault.at(row)
            return f"worker for {row}"

        async def prepare() -> None:
            fault.at(row)

        try:
            placed, _ = await queues.admit(
                "m", attempt, lambda: WaitTerms(max_wait_ms=60_000, max_wait_for_workers_ms=60_000), prepare
            )
            outcome.outputs[row] = placed
        except SluiceError as error:
            outcome.errors[row] = error
        except Exception:
            outcome.errors[row] = internal("The request failed.")

    asked = [asyncio.ensure_future(ask(row)) for row in range(ROWS)]
    await asyncio.sleep(0)
    free.set()
    queues.ended("m", 1)
    await asyncio.gather(*asked)
    outcome.alive = not deaths
    await tasks.close()
    return outcome


class _View:
    """A model's state, as far as a round over models needs it."""

    def __init__(self, row: int) -> None:
        self.model = f"m{row}"
        self.taken: list[Any] = []
        self.predictions = mock.Mock()
        self.drop_orphans = mock.Mock()

    def take(self, pulse: Any) -> None:
        self.taken.append(pulse)


@rig("router.tend")
async def tend(fault: Fault) -> Outcome:
    """The failed model is told apart by what its round did not reach."""
    views = {f"m{row}": _View(row) for row in range(ROWS)}

    class Store:
        async def models(self) -> list[str]:
            return list(views)

        async def sweep(self, model: str, lease_ms: int) -> None:
            fault.at(int(model[1:]))

        async def pulse(self, model: str) -> str:
            fault.at(int(model[1:]))
            return f"pulse of {model}"

    corrected: list[str] = []

    async def correct(view: _View) -> None:
        fault.at(int(view.model[1:]))
        corrected.append(view.model)

    synchronizer = IndexSynchronizer.__new__(IndexSynchronizer)
    synchronizer._store = cast(Any, Store())
    synchronizer._views = cast(Any, views)
    synchronizer._health = cast(Any, mock.Mock(available_for_s=10.0))
    synchronizer._lease_s = 1.0
    synchronizer._reservations = cast(Any, mock.Mock(replay_local=mock.AsyncMock()))
    synchronizer._reconciler = cast(Any, mock.Mock(correct=correct))
    await synchronizer._tend_once()
    outcome = Outcome({row: views[f"m{row}"].taken for row in range(ROWS)})
    outcome.errors = {row: internal("not tended") for row in range(ROWS) if f"m{row}" not in corrected}
    return outcome


@rig("router.recover")
async def recover(fault: Fault) -> Outcome:
    class Attachment:
        def __init__(self, row: int) -> None:
            self.row = row
            self.reopened = False
            self.refused: Exception | None = None

        async def reopen(self) -> None:
            fault.at(self.row)
            self.reopened = True

        def refuse(self, error: Exception) -> None:
            self.refused = error

    attachments = {row: Attachment(row) for row in range(ROWS)}
    manager = WorkerManager.__new__(WorkerManager)
    manager._attachments = cast(Any, attachments)
    await manager.recover()
    outcome = Outcome({row: attachment.reopened for row, attachment in attachments.items()})
    outcome.errors = {row: internal("refused") for row, attachment in attachments.items() if attachment.refused}
    return outcome
