"""One data-parallel rank of the mock engine: a scheduler, its KV events, and the task that runs its steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from services.common.base.errors import SluiceError, internal
from services.common.base.shared_steps import shared_step
from services.worker.contract.cache_events import KvEvent, KvEventSource
from services.worker.contract.engine import Load, Sink
from services.worker.contract.generation import FinishReason, Usage
from services.worker.engines.mock.faults import injected
from services.worker.engines.mock.operations import Operations
from services.worker.engines.mock.outputs import logprobs_at, prompt_logprobs
from services.worker.engines.mock.scheduler import MockScheduler, MockStep
from services.worker.engines.mock.sequence import Sequence
from services.worker.engines.mock.timing import StepPacer

log = logging.getLogger(__name__)


class Statistics:
    """Counts the steps of all ranks, for metrics; may be read from another thread."""

    def __init__(self) -> None:
        self._steps = self._prefill_tokens = self._output_tokens = self._preemptions = 0
        self._cache_use = 0.0

    def count(self, step: MockStep, cache_use: float) -> None:
        """Counts one completed step."""
        self._steps += 1
        self._prefill_tokens += step.prefill_tokens
        self._output_tokens += len(step.rows)
        self._preemptions += step.preempted
        self._cache_use = cache_use

    def text(self) -> str:
        """Returns all metrics in the Prometheus text format."""
        metrics = (
            ("mock_engine_steps", "counter", self._steps, "engine steps"),
            ("mock_engine_prefill_tokens", "counter", self._prefill_tokens, "prompt tokens computed"),
            ("mock_engine_output_tokens", "counter", self._output_tokens, "tokens generated"),
            ("mock_engine_preemptions", "counter", self._preemptions, "sequences preempted"),
            ("mock_engine_cache_use", "gauge", self._cache_use, "share of KV-cache blocks in use"),
        )
        return "".join(
            f"# HELP {name} {what}\n# TYPE {name} {kind}\n{name}{'_total' if kind == 'counter' else ''} {value}\n"
            for name, kind, value, what in metrics
        )


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
        self._step: MockStep | None = None
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
        operations = self._operations
        if operations.faults.poison is not None:
            operations.faults = operations.faults.after_arrival(sequence.request.token_ids)
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
            if operations.faults.crash_in is not None:
                operations.faults = operations.faults.after_step()
            self._step = step = scheduler.step(pacer.now)
            self._unpublished += step.events
            await pacer.spend(step.duration_s)
            self._step = None
            self._statistics.count(step, scheduler.pool.used / scheduler.pool.total)
            self._emit(step)

    def _complete_transfer(self, sequence: Sequence) -> None:
        self._transfers.pop(sequence.request.request_id, None)
        try:
            self._scheduler.submit(sequence)
        except SluiceError as error:
            self._end_early(sequence, FinishReason.ERROR, error)
            return
        except Exception as error:
            self._fail(sequence, error)
            return
        self._work.set()

    @shared_step("mock.emit")
    def _emit(self, step: MockStep) -> None:
        """Pushes the tokens of a step; what one sequence raises ends only that sequence."""
        if self._unpublished:
            self._publish()
        for sequence, error in step.failed:
            self._fail(sequence, error)
        for sequence, token_id in step.rows:
            sink = sequence.sink
            if sink is None:
                continue  # aborted during the step
            try:
                if not sequence.has_begun:
                    self._begin(sequence, sink)
                if sequence.request.logprobs is None:
                    sink.push((token_id,))
                else:
                    self._push_with_logprobs(sequence, sink, token_id, sequence.request.logprobs)
            except Exception as error:
                self._fail(sequence, error)
        if self._operations.faults.error_after:
            self._inject_errors(step)
        for sequence in step.ended:
            if sequence.sink is not None and sequence.answer is not None:
                try:
                    answer = sequence.answer
                    self._finish(sequence, answer.reason, sequence.usage(), answer.stop_token_id)
                    del self._running[sequence.request.request_id]
                except Exception as error:
                    self._fail(sequence, error)
        if step.ended:
            self._update_idle()

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        log.error("a sequence failed", extra={"request": sequence.request.request_id}, exc_info=error)
        failed = error if isinstance(error, SluiceError) else internal("The engine failed on this request.")
        self._end_early(sequence, FinishReason.ERROR, failed)

    def _begin(self, sequence: Sequence, sink: Sink) -> None:
        sequence.has_begun = True
        count = sequence.request.prompt_logprobs
        if count is None:
            sink.begin(sequence.cached_tokens)
        else:
            sink.begin(sequence.cached_tokens, prompt_logprobs(sequence.request.token_ids, count, self._vocab_size))

    def _push_with_logprobs(self, sequence: Sequence, sink: Sink, token_id: int, count: int) -> None:
        sink.push((token_id,), (logprobs_at(token_id, count, self._vocab_size),))

    def _inject_errors(self, step: MockStep) -> None:
        limit = self._operations.faults.error_after
        for sequence, _ in step.rows:
            if sequence.sink is not None and sequence.generated_tokens >= limit:
                self._end_early(sequence, FinishReason.ERROR, injected(f"the request fails after {limit} tokens"))

    def _publish(self) -> None:
        events, self._unpublished = self._unpublished, []
        if events:
            self._source.publish(events)

    def _end_early(self, sequence: Sequence, reason: FinishReason, error: SluiceError | None = None) -> None:
        request_id = sequence.request.request_id
        self._running.pop(request_id, None)
        if timer := self._transfers.pop(request_id, None):
            timer.cancel()
            usage = sequence.usage(undelivered=sequence.generated_tokens)
        else:
            # The current step may have computed a token that is no longer delivered.
            rows = self._step.rows if self._step is not None else ()
            usage = sequence.usage(sum(1 for row, _ in rows if row is sequence))
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
        handoff = self._handoff(sequence) if reason is FinishReason.HANDOFF else b""
        sink, sequence.sink = sequence.sink, None
        if sink is not None:
            sink.finish(reason, usage, stop_token_id=stop_token_id, error=error, handoff=handoff)

    def _update_idle(self) -> None:
        if not self._running:
            self.idle.set()
