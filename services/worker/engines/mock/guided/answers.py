"""Generates outputs with a structured output constraint off the event loop, before their requests are queued."""

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
    """Tracks the sequences whose outputs are being generated.

    Args:
        make: Generates the output of a request, with a maximum number of tokens.
        enqueue: Submits a sequence to a rank; may raise SluiceError.
        tasks: Owns the tasks.
        limit_s: Timeout per output in seconds.
        threads: Number of threads.
        max_waiting: Maximum number of sequences; more are rejected.
    """

    def __init__(
        self,
        make: MakeAnswer,
        enqueue: Callable[[Sequence], None],
        tasks: TaskOwner,
        limit_s: float,
        threads: int,
        max_waiting: int,
    ) -> None:
        self._make = make
        self._enqueue = enqueue
        self._tasks = tasks
        self._limit_s = limit_s
        self._max_waiting = max_waiting
        self._compiler = GrammarCompiler(limit_s, threads)
        self._waiting: dict[str, tuple[Sequence, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, sequence: Sequence) -> None:
        """Generates the output and queues the sequence, or ends it with an error.

        Raises:
            SluiceError: OVERLOADED when too many sequences are waiting.
        """
        if len(self._waiting) > self._max_waiting:
            raise overloaded(
                f"The engine's queue is full ({len(self._waiting)} requests waiting for grammars); try again later."
            )
        request_id = sequence.request.request_id
        task = self._tasks.spawn(self._prepare(sequence), f"guided-{request_id}")
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
        self._compiler.close()

    async def _prepare(self, sequence: Sequence) -> None:
        request = sequence.request
        try:
            sequence.prepare(await self._compiler.run(lambda: self._answer(sequence)))
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
