"""One data-parallel rank of the mock engine: a scheduler, its KV events, and the task that runs its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.common.errors import SluiceError
from services.worker.contract.cache_events import KvEvent, KvEventSource
from services.worker.contract.engine import Load, Sink
from services.worker.contract.generation import FinishReason, Usage
from services.worker.engines.mock.faults import injected
from services.worker.engines.mock.operations import Operations
from services.worker.engines.mock.probabilities import logprobs_at, prompt_logprobs
from services.worker.engines.mock.scheduler import MockScheduler, MockStep
from services.worker.engines.mock.sequence import Sequence
from services.worker.engines.mock.statistics import Statistics
from services.worker.engines.mock.timing import StepPacer


class Rank:
    """Runs sequences and pushes their tokens to their sinks.

    Args:
        source: Receives the rank's KV events.
        operations: Provides the active faults.
        statistics: Metrics of the whole engine.
        vocab_size: Vocabulary size for mock log-probabilities.
        handoff: Returns the handoff of a sequence that ends with HANDOFF.

    Attributes:
        idle: Set while no request is in flight.
    """

    def __init__(
        self,
        scheduler: MockScheduler,
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
        self._step = MockStep()
        self._work = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    def load(self) -> Load:
        """Returns the rank's load."""
        return self._scheduler.load()

    def request_count(self) -> int:
        """Returns the number of requests in flight."""
        return len(self._running)

    def wake(self) -> None:
        """Resumes stepping after a change of faults or sleep."""
        self._work.set()

    def submit(self, sequence: Sequence, transfer_s: float) -> None:
        """Queues a sequence after its cache transfer; raises SluiceError(OVERLOADED) when the queue is full."""
        request_id = sequence.request.request_id
        if transfer_s:
            timer = asyncio.get_running_loop().call_later(transfer_s, self._complete_transfer, sequence)
            self._transfers[request_id] = timer
        else:
            self._scheduler.submit(sequence)
        self._running[request_id] = sequence
        self.idle.clear()
        self._work.set()

    def abort(self, request_id: str) -> None:
        """Ends a request with CANCELLED; ignores unknown requests."""
        if sequence := self._running.get(request_id):
            self._end_early(sequence, FinishReason.CANCELLED)

    def abort_all(self) -> None:
        """Ends every request with CANCELLED."""
        for request_id in tuple(self._running):
            self.abort(request_id)

    def clear_cache(self) -> None:
        """Clears the prefix cache and publishes the event."""
        pool = self._scheduler.pool
        pool.clear()
        self._unpublished += pool.take_events()
        self._publish()

    async def run(self) -> None:
        """Runs steps until cancelled."""
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
            self._step = MockStep()
            self._statistics.count(step, scheduler.pool.used / scheduler.pool.total)
            self._emit(step)

    def _complete_transfer(self, sequence: Sequence) -> None:
        self._transfers.pop(sequence.request.request_id, None)
        try:
            self._scheduler.submit(sequence)
        except SluiceError as error:
            self._end_early(sequence, FinishReason.ERROR, error)
            return
        self._work.set()

    def _emit(self, step: MockStep) -> None:
        self._publish()
        for sequence, token_id in step.rows:
            sink = sequence.sink
            if sink is None:
                continue  # aborted during the step
            if sequence.generated_tokens == 1:
                self._begin(sequence, sink)
            if sequence.request.logprobs is None:
                sink.push((token_id,))
            else:
                self._push_with_logprobs(sequence, sink, token_id, sequence.request.logprobs)
        if self._operations.faults.error_after:
            self._inject_errors(step)
        for sequence in step.ended:
            if sequence.sink is not None and sequence.answer is not None:
                del self._running[sequence.request.request_id]
                answer = sequence.answer
                self._finish(sequence, answer.reason, sequence.usage(), answer.stop_token_id)
        self._update_idle()

    def _begin(self, sequence: Sequence, sink: Sink) -> None:
        count = sequence.request.prompt_logprobs
        if count is None:
            sink.begin(sequence.cached_tokens)
        else:
            sink.begin(sequence.cached_tokens, prompt_logprobs(sequence.request.token_ids, count, self._vocab_size))

    def _push_with_logprobs(self, sequence: Sequence, sink: Sink, token_id: int, count: int) -> None:
        sink.push((token_id,), (logprobs_at(token_id, sequence.token_count - 1, count, self._vocab_size),))

    def _inject_errors(self, step: MockStep) -> None:
        limit = self._operations.faults.error_after
        for sequence, _ in step.rows:
            if sequence.sink is not None and sequence.generated_tokens >= limit:
                self._end_early(sequence, FinishReason.ERROR, injected(f"the request fails after {limit} tokens"))

    def _publish(self) -> None:
        events, self._unpublished = self._unpublished, []
        if events:
            for _ in range(self._operations.faults.events):
                self._source.publish(events)

    def _end_early(self, sequence: Sequence, reason: FinishReason, error: SluiceError | None = None) -> None:
        request_id = sequence.request.request_id
        self._running.pop(request_id, None)
        if timer := self._transfers.pop(request_id, None):
            timer.cancel()
            usage = sequence.usage(undelivered=sequence.generated_tokens)
        else:
            # The current step may have computed a token that is no longer delivered.
            usage = sequence.usage(sum(1 for row, _ in self._step.rows if row is sequence))
            self._scheduler.cancel(sequence)
        self._finish(sequence, reason, usage, error=error)
        self._update_idle()

    def _finish(
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

    def _update_idle(self) -> None:
        if not self._running:
            self.idle.set()
