"""One data-parallel rank of the mock engine: a scheduler, the cache events it tells, and the task that steps it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.common.errors import SluiceError
from services.worker.contract.cache_events import KvEvent, KvEventSource
from services.worker.contract.engine import Load
from services.worker.contract.generation import FinishReason, Usage
from services.worker.engines.mock.extras import begin, push_with_logprobs
from services.worker.engines.mock.faults import injected
from services.worker.engines.mock.operations import Operations
from services.worker.engines.mock.pacing import StepPacer
from services.worker.engines.mock.scheduler import Scheduler, Step
from services.worker.engines.mock.sequence import Sequence
from services.worker.engines.mock.statistics import Statistics


class Rank:
    """Runs sequences and tells their sinks.

    Args:
        source: hears of changes of the cache.
        operations: whose faults are suffered.
        statistics: of the whole engine.
        vocab_size: for made-up log-probabilities.
        handoff: what a sequence that ends with HANDOFF hands over.

    Attributes:
        idle: set while nothing runs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        source: KvEventSource,
        operations: Operations,
        statistics: Statistics,
        vocab_size: int,
        handoff: Callable[[Sequence], bytes],
    ) -> None:
        self._scheduler = scheduler
        self._source = source
        self._operations = operations
        self._statistics = statistics
        self._vocab_size = vocab_size
        self._handoff = handoff
        self._running: dict[str, Sequence] = {}
        self._transfers: dict[str, asyncio.TimerHandle] = {}
        self._unpublished: list[KvEvent] = []
        self._step = Step()
        self._work = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    def load(self) -> Load:
        """How it is doing."""
        return self._scheduler.load()

    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    def wake(self) -> None:
        """Something has changed: there may be work."""
        self._work.set()

    def submit(self, sequence: Sequence, transfer_s: float) -> None:
        """Runs a sequence, once its cache is here; SluiceError(OVERLOADED) when the queue is full."""
        request_id = sequence.request.request_id
        if transfer_s:
            later = asyncio.get_running_loop().call_later(transfer_s, self._arrive, sequence)
            self._transfers[request_id] = later
        else:
            self._scheduler.submit(sequence)
        self._running[request_id] = sequence
        self.idle.clear()
        self._work.set()

    def abort(self, request_id: str) -> None:
        """Ends a request as cancelled; unknown ones are ignored."""
        if sequence := self._running.get(request_id):
            self._end_early(sequence, FinishReason.CANCELLED)

    def abort_all(self) -> None:
        """Ends every request as cancelled."""
        for request_id in tuple(self._running):
            self.abort(request_id)

    def clear_cache(self) -> None:
        """Forgets every prefix that no sequence uses, and tells so."""
        pool = self._scheduler.pool
        pool.clear()
        self._unpublished += pool.take_events()
        self._publish()

    async def run(self) -> None:
        """Steps until cancelled."""
        scheduler, operations, pacer = self._scheduler, self._operations, StepPacer()
        while True:
            if not scheduler.busy or operations.faults.hang:
                self._work.clear()
                await self._work.wait()
                pacer.resume()
                continue
            operations.faults = operations.faults.after_step()
            self._step = step = scheduler.step(pacer.now)
            self._unpublished += step.events
            await pacer.spend(step.duration_s * operations.faults.slow)
            self._step = Step()
            self._statistics.count(step, scheduler.pool.used / scheduler.pool.total)
            self._emit(step)

    def _arrive(self, sequence: Sequence) -> None:
        """The cache of a sequence is here."""
        self._transfers.pop(sequence.request.request_id, None)
        try:
            self._scheduler.submit(sequence)
        except SluiceError as error:
            self._end_early(sequence, FinishReason.ERROR, error)
            return
        self._work.set()

    def _emit(self, step: Step) -> None:
        self._publish()
        for sequence, token_id in step.rows:
            sink = sequence.sink
            if sink is None:
                continue  # aborted while the step ran
            if sequence.known == sequence.first_known:
                begin(sequence, sink, self._vocab_size)
            if sequence.request.logprobs is None:
                sink.push((token_id,))
            else:
                push_with_logprobs(sequence, sink, token_id, self._vocab_size)
        if self._operations.faults.error_after:
            self._fail_some(step)
        for sequence in step.ended:
            if sequence.sink is not None and sequence.answer is not None:
                del self._running[sequence.request.request_id]
                answer = sequence.answer
                self._deliver_end(sequence, answer.reason, sequence.usage(), answer.stop_token_id)
        self._note_idle()

    def _fail_some(self, step: Step) -> None:
        most = self._operations.faults.error_after
        for sequence, _ in step.rows:
            if sequence.sink is not None and sequence.usage().completion_tokens >= most:
                self._end_early(sequence, FinishReason.ERROR, injected(f"the request fails after {most} tokens"))

    def _publish(self) -> None:
        events, self._unpublished = self._unpublished, []
        if events:
            for _ in range(self._operations.faults.events):
                self._source.publish(events)

    def _end_early(self, sequence: Sequence, reason: FinishReason, error: SluiceError | None = None) -> None:
        request_id = sequence.request.request_id
        self._running.pop(request_id, None)
        if later := self._transfers.pop(request_id, None):
            later.cancel()
            usage = sequence.usage(sequence.known - sequence.prompt_tokens - sequence.handed)
        else:
            # A step that is under way may have computed a token that nobody gets any more.
            usage = sequence.usage(sum(1 for row, _ in self._step.rows if row is sequence))
            self._scheduler.cancel(sequence)
        self._deliver_end(sequence, reason, usage, error=error)
        self._note_idle()

    def _deliver_end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        usage: Usage,
        stop_token_id: int | None = None,
        error: SluiceError | None = None,
    ) -> None:
        sink, sequence.sink = sequence.sink, None
        if sink is not None:
            handoff = self._handoff(sequence) if reason is FinishReason.HANDOFF else b""
            sink.finish(reason, usage, stop_token_id=stop_token_id, error=error, handoff=handoff)

    def _note_idle(self) -> None:
        if not self._running:
            self.idle.set()
