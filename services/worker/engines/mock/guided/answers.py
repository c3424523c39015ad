"""Generates outputs with a structured output constraint off the event loop, before their requests are queued."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from services.common.tasks import TaskOwner
from services.worker.contract.generation import GenerateRequest
from services.worker.engines.mock.guided.effort import Effort
from services.worker.engines.mock.preparation import Preparation
from services.worker.engines.mock.sequence import Sequence
from services.worker.engines.mock.text import Answer
from services.worker.engines.shared.grammar_compiler import GrammarCompiler

MakeAnswer = Callable[[GenerateRequest, int, Effort], Answer]


class GuidedAnswers(Preparation):
    """Generates the outputs of sequences before they are queued.

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
        super().__init__("guided", "grammars", tasks, max_waiting)
        self._make = make
        self._enqueue = enqueue
        self._limit_s = limit_s
        self._compiler = GrammarCompiler(limit_s, threads)

    def close(self) -> None:
        super().close()
        self._compiler.close()

    async def prepare(self, sequence: Sequence) -> None:
        sequence.prepare(await self._compiler.run(lambda: self._answer(sequence)))
        self._enqueue(sequence)

    def _answer(self, sequence: Sequence) -> Answer:
        return self._make(sequence.request, sequence.limit, Effort(monotonic() + self._limit_s))
