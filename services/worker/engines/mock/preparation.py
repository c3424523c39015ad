"""Work on sequences off the event loop, before they are queued: the sequences that wait for it, within a bound."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from services.common.errors import SluiceError, overloaded
from services.common.tasks import TaskOwner
from services.worker.contract.generation import FinishReason
from services.worker.engines.mock.sequence import Sequence


class Preparation(ABC):
    """Tracks the sequences that are being prepared.

    Args:
        name: Of the tasks.
        needed: What the sequences wait for, in errors.
        tasks: Owns the tasks.
        max_waiting: Maximum number of sequences; more are rejected.
    """

    def __init__(self, name: str, needed: str, tasks: TaskOwner, max_waiting: int) -> None:
        self._name = name
        self._needed = needed
        self._tasks = tasks
        self._max_waiting = max_waiting
        self._waiting: dict[str, tuple[Sequence, asyncio.Task[None]]] = {}

    @abstractmethod
    async def prepare(self, sequence: Sequence) -> None:
        """Prepares a sequence and continues with it; may raise SluiceError, which ends it."""

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, sequence: Sequence) -> None:
        """Prepares the sequence and continues with it, or ends it with an error.

        Raises:
            SluiceError: OVERLOADED when too many sequences are waiting.
        """
        if len(self._waiting) > self._max_waiting:
            raise overloaded(
                f"The engine's queue is full ({len(self._waiting)} requests waiting for {self._needed}); try again "
                "later."
            )
        request_id = sequence.request.request_id
        task = self._tasks.spawn(self._run(sequence), f"{self._name}-{request_id}")
        self._waiting[request_id] = sequence, task

    def abort(self, request_id: str) -> None:
        """Ends a waiting sequence with CANCELLED; ignores unknown requests."""
        if entry := self._waiting.pop(request_id, None):
            sequence, task = entry
            task.cancel()
            _end(sequence, FinishReason.CANCELLED)

    async def drain(self) -> None:
        """Waits until no sequence is waiting."""
        while self._waiting:
            await asyncio.wait([task for _, task in self._waiting.values()])

    def close(self) -> None:
        """Ends all waiting sequences with CANCELLED."""
        for request_id in tuple(self._waiting):
            self.abort(request_id)

    async def _run(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        try:
            await self.prepare(sequence)
        except SluiceError as error:
            _end(sequence, FinishReason.ERROR, error)
        finally:
            if self._waiting.get(request_id, (None,))[0] is sequence:
                del self._waiting[request_id]


def _end(sequence: Sequence, reason: FinishReason, error: SluiceError | None = None) -> None:
    sink, sequence.sink = sequence.sink, None
    if sink is not None:
        sink.finish(reason, sequence.usage(), error=error)
