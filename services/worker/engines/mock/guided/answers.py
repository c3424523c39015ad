"""Answers under a constraint, made off the event loop before their requests are queued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from services.common.errors import SluiceError, overloaded
from services.common.tasks import TaskOwner
from services.worker.contract.generation import FinishReason, GenerateRequest
from services.worker.engines.mock.guided.effort import Effort
from services.worker.engines.mock.sequence import Sequence
from services.worker.engines.mock.text import Answer
from services.worker.engines.shared.grammar_compiler import GrammarCompiler

MakeAnswer = Callable[[GenerateRequest, int, Effort], Answer]


class GuidedAnswers:
    """The sequences whose answers are being made.

    Args:
        make: a request's answer of so many tokens.
        enqueue: gives a sequence to a rank; may raise SluiceError.
        tasks: owns the waiting.
        limit_s: longest that one takes, seconds.
        threads: answers made at once.
        most: sequences at once; more are refused.
    """

    def __init__(
        self,
        make: MakeAnswer,
        enqueue: Callable[[Sequence], None],
        tasks: TaskOwner,
        limit_s: float,
        threads: int,
        most: int,
    ) -> None:
        self._make = make
        self._enqueue = enqueue
        self._tasks = tasks
        self._limit_s = limit_s
        self._most = most
        self._compiling = GrammarCompiler(limit_s, threads)
        self._waiting: dict[str, tuple[Sequence, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, sequence: Sequence) -> None:
        """Makes the answer and queues the sequence, or ends it with the error.

        Raises:
            SluiceError: OVERLOADED when as many wait as may.
        """
        if len(self._waiting) > self._most:
            raise overloaded(f"The engine's queue is full: {len(self._waiting)} requests wait for their grammars.")
        request_id = sequence.request.request_id
        task = self._tasks.spawn(self._prepare(sequence), f"guided-{request_id}")
        self._waiting[request_id] = sequence, task

    def abort(self, request_id: str) -> None:
        """Ends a sequence that waits as cancelled; unknown ones are ignored."""
        if found := self._waiting.pop(request_id, None):
            sequence, task = found
            task.cancel()
            _end(sequence, FinishReason.CANCELLED)

    async def drain(self) -> None:
        """Returns when none waits."""
        while self._waiting:
            await asyncio.wait([task for _, task in self._waiting.values()])

    def close(self) -> None:
        """Ends all of them as cancelled."""
        for request_id in tuple(self._waiting):
            self.abort(request_id)
        self._compiling.close()

    async def _prepare(self, sequence: Sequence) -> None:
        request = sequence.request
        try:
            sequence.prepare(await self._compiling.run(lambda: self._answer(sequence)))
            self._enqueue(sequence)
        except SluiceError as error:
            _end(sequence, FinishReason.ERROR, error)
        finally:
            if self._waiting.get(request.request_id, (None,))[0] is sequence:
                del self._waiting[request.request_id]

    def _answer(self, sequence: Sequence) -> Answer:
        return self._make(sequence.request, sequence.limit, Effort(monotonic() + self._limit_s))


def _end(sequence: Sequence, reason: FinishReason, error: SluiceError | None = None) -> None:
    sink, sequence.sink = sequence.sink, None
    if sink is not None:
        sink.finish(reason, sequence.usage(), error=error)
