"""The mock engine: one task that steps the scheduler and keeps its clock."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Self

from services.common.errors import ErrorKind, SluiceError, invalid
from services.worker.cache_events import KvEvent, KvEventSource
from services.worker.delta_stream import DeltaStream
from services.worker.engine import Embedded, EngineConfig, GenerateContext, LLMEngine, Load, Sink
from services.worker.engines.mock.blocks import BlockPool
from services.worker.engines.mock.claims import ACCEPTED, CAPABILITIES, capabilities_of
from services.worker.engines.mock.embeddings import embed
from services.worker.engines.mock.faults import Faults, injected
from services.worker.engines.mock.loading import Loaded, load, timing
from services.worker.engines.mock.operations import Operations
from services.worker.engines.mock.pacing import Pacer
from services.worker.engines.mock.scheduler import Scheduler, Step
from services.worker.engines.mock.sequence import Sequence as Running
from services.worker.engines.mock.speaking import begin, push_with_logprobs
from services.worker.engines.mock.statistics import Statistics
from services.worker.engines.mock.text import Answer
from services.worker.engines.mock.transfer import accepted, transfer_of
from services.worker.generation import Delta, FinishReason, GenerateRequest, Role, Usage
from services.worker.settings import WorkerSettings

DEFAULT_CONTEXT_LENGTH = 32_768
VERSION = "2"


class MockEngine(LLMEngine):
    """Behaves like an engine with a GPU, in real or faster time, and answers in words of the model's tokenizer.

    The same prompt and seed give the same answer. Of the sampling options it honours those that `claims` lists.
    """

    CAPABILITIES = CAPABILITIES
    ACCEPTED = ACCEPTED

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._role = Role[settings.role.upper()]
        self._timing = timing(settings)
        self._operations = Operations(
            tuple(settings.adapters), Faults().with_all(settings.fault), lambda: self._changed()
        )
        self._running: dict[str, Running] = {}
        self._transfers: dict[str, asyncio.TimerHandle] = {}
        self._arrivals = 0
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loaded: Loaded | None = None
        self._scheduler: Scheduler | None = None
        self._context_length = self._vocab_size = 0
        self._source = KvEventSource(rank=0)
        self._unpublished: list[KvEvent] = []
        self._step = Step()
        self._statistics = Statistics()

    @classmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        if settings.engine_args or settings.engine_flags:
            raise invalid("The mock engine has no options of its own; its settings are flags.", param="engine-args")
        return cls(settings)

    async def start(self, worker_id: str) -> EngineConfig:
        settings = self._settings
        self.on_phase("loading the tokenizer", None)
        self._loaded = loaded = await asyncio.to_thread(load, settings)
        self._vocab_size = loaded.vocabulary.size
        # A sequence that fills the whole cache is the longest one that can ever finish.
        self._context_length = min(
            settings.context_length or loaded.context_length or DEFAULT_CONTEXT_LENGTH,
            settings.total_blocks * settings.block_size,
        )
        self._scheduler = Scheduler(
            BlockPool(settings.total_blocks, index=self._role is not Role.DECODE),
            self._timing,
            self._answer,
            block_size=settings.block_size,
            max_sequences=settings.max_sequences,
            max_batched_tokens=settings.max_batched_tokens,
            max_waiting=settings.max_waiting,
        )
        self.tasks.spawn(self._run(self._scheduler), "mock-engine-steps")
        return EngineConfig(
            model=settings.spec.name,
            source=settings.spec.source,
            processor=loaded.processor,
            fingerprint=loaded.fingerprint,
            context_length=self._context_length,
            vocab_size=self._vocab_size,
            block_size=settings.block_size,
            total_blocks=settings.total_blocks,
            max_sequences=settings.max_sequences,
            max_batched_tokens=settings.max_batched_tokens,
            eos_token_ids=loaded.vocabulary.eos_ids,
            capabilities=frozenset(capabilities_of(self._role)),
            accepted=frozenset(ACCEPTED),
            adapters=tuple(settings.adapters),
            role=self._role,
            engine="mock",
            engine_version=VERSION,
        )

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        scheduler, loaded = self._awake()
        room = self._context_length - len(request.token_ids)
        limit = room if request.stop.max_tokens is None else min(request.stop.max_tokens, room)
        if limit < 1:
            raise invalid(f"The prompt leaves no room in the context of {self._context_length} tokens.", param="prompt")
        loaded.storyteller.check(request)
        sequence = Running(request, limit, self._arrivals, sink)
        transfer_s = self._take_over(sequence, loaded)
        if transfer_s:
            later = asyncio.get_running_loop().call_later(transfer_s, self._arrive, sequence)
            self._transfers[request.request_id] = later
        else:
            scheduler.submit(sequence)
        self._arrivals += 1
        self._running[request.request_id] = sequence
        self._idle.clear()
        self._work.set()

    async def generate(self, request: GenerateRequest, context: GenerateContext) -> AsyncGenerator[Delta, None]:
        stream = DeltaStream()
        self.submit(request, context, stream)
        try:
            async with aclosing(stream.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self.abort(context)

    def abort(self, context: GenerateContext) -> None:
        context.cancelled = True
        if sequence := self._running.get(context.request_id):
            self._end_early(sequence, FinishReason.CANCELLED)

    async def drain(self) -> None:
        await self._idle.wait()

    async def cleanup(self) -> None:
        await self.tasks.close()
        for request_id in tuple(self._running):
            self.abort(GenerateContext(request_id))

    def load(self) -> Sequence[Load]:
        return [Load() if self._scheduler is None else self._scheduler.load()]

    def kv_event_sources(self) -> Sequence[KvEventSource]:
        return () if self._role is Role.DECODE else (self._source,)

    async def clear_cache(self) -> None:
        pool = self._started().pool
        pool.clear()
        self._unpublished += pool.take_events()
        self._publish()

    async def embed(self, inputs: Sequence[array[int]], dimensions: int, lora: str = "") -> Embedded:
        self._awake()
        return await asyncio.to_thread(embed, inputs, self._settings.embedding_width, dimensions, lora)

    async def control(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        results = self._operations.run(action, arguments)
        if self._operations.asleep:
            await self.clear_cache()
        return results

    def metrics_text(self) -> str:
        return self._statistics.text()

    def _started(self) -> Scheduler:
        if self._scheduler is None:
            raise SluiceError(ErrorKind.UNAVAILABLE, "The engine has not started yet.", code="engine_starting")
        return self._scheduler

    def _awake(self) -> tuple[Scheduler, Loaded]:
        scheduler = self._started()
        assert self._loaded is not None
        if self._operations.asleep:
            raise SluiceError(ErrorKind.UNAVAILABLE, "The engine sleeps; wake it first.", code="asleep")
        if self._operations.faults.refuse:
            raise injected("requests are refused", ErrorKind.ENGINE_SHUTDOWN)
        return scheduler, self._loaded

    def _answer(self, request: GenerateRequest, limit: int) -> Answer:
        assert self._loaded is not None
        answer = self._loaded.storyteller.answer(request, limit)
        if self._role is Role.PREFILL and len(answer.token_ids) > 1:
            return Answer(answer.token_ids[:1], FinishReason.HANDOFF)
        return answer

    def _take_over(self, sequence: Running, loaded: Loaded) -> float:
        """Prepares a sequence whose prompt was computed elsewhere; returns how long its cache travels, seconds."""
        request = sequence.request
        if request.disaggregation is None or request.disaggregation.role is not Role.DECODE:
            return 0.0
        answer = loaded.storyteller.answer(request, sequence.limit)
        transfer = accepted(request.disaggregation.handoff, request, answer, self._settings.block_size)
        sequence.hand_over(answer)
        return transfer.cache_bytes * 8e-9 / self._settings.transfer_gbps / self._settings.speedup

    def _arrive(self, sequence: Running) -> None:
        """The cache of a sequence is here."""
        self._transfers.pop(sequence.request.request_id, None)
        try:
            self._started().submit(sequence)
        except SluiceError as error:
            self._end_early(sequence, FinishReason.ERROR, error)
            return
        self._work.set()

    def _changed(self) -> None:
        self._work.set()

    async def _run(self, scheduler: Scheduler) -> None:
        pacer = Pacer()
        while True:
            if not scheduler.busy or self._operations.faults.hang:
                self._work.clear()
                await self._work.wait()
                pacer.resume()
                continue
            self._operations.faults = self._operations.faults.after_step()
            self._step = step = scheduler.step(pacer.now)
            self._unpublished += step.events
            await pacer.spend(step.duration_s * self._operations.faults.slow)
            self._step = Step()
            self._statistics.count(step, scheduler.pool.used / scheduler.pool.total)
            self._emit(step)

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

    def _end_early(self, sequence: Running, reason: FinishReason, error: SluiceError | None = None) -> None:
        request_id = sequence.request.request_id
        self._running.pop(request_id, None)
        if later := self._transfers.pop(request_id, None):
            later.cancel()
            usage = sequence.usage(sequence.known - sequence.prompt_tokens - sequence.handed)
        else:
            # A step that is under way may have computed a token that nobody gets any more.
            usage = sequence.usage(sum(1 for row, _ in self._step.rows if row is sequence))
            self._started().cancel(sequence)
        self._deliver_end(sequence, reason, usage, error=error)
        self._note_idle()

    def _deliver_end(
        self,
        sequence: Running,
        reason: FinishReason,
        usage: Usage,
        stop_token_id: int | None = None,
        error: SluiceError | None = None,
    ) -> None:
        sink, sequence.sink = sequence.sink, None
        if sink is not None:
            handoff = b""
            if reason is FinishReason.HANDOFF:
                handoff = transfer_of(sequence, self._settings.block_size, self._settings.kv_token_bytes).pack()
            sink.finish(reason, usage, stop_token_id=stop_token_id, error=error, handoff=handoff)

    def _note_idle(self) -> None:
        if not self._running:
            self._idle.set()
