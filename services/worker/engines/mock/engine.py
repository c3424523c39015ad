"""The mock engine: one task that steps the scheduler and keeps its clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self

from services.common import models
from services.common.errors import ErrorKind, SluiceError, invalid
from services.worker.cache_events import KvEvent, KvEventSource
from services.worker.delta_stream import DeltaStream
from services.worker.engine import EngineConfig, GenerateContext, LLMEngine, Load, Sink
from services.worker.engines.mock.blocks import BlockPool
from services.worker.engines.mock.claims import ACCEPTED, CAPABILITIES
from services.worker.engines.mock.pacing import Pacer
from services.worker.engines.mock.scheduler import Scheduler, Step
from services.worker.engines.mock.sequence import Sequence as Running
from services.worker.engines.mock.text import Storyteller
from services.worker.engines.mock.timing import FixedTiming, ModelledTiming, StepTiming
from services.worker.engines.mock.vocabulary import Vocabulary, declared_context_length, load_vocabulary
from services.worker.generation import Delta, FinishReason, GenerateRequest, Role, Usage
from services.worker.settings import WorkerSettings

DEFAULT_CONTEXT_LENGTH = 32_768
VERSION = "1"


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What reading the model's files gives."""

    vocabulary: Vocabulary
    storyteller: Storyteller
    processor: str
    fingerprint: str
    context_length: int


class MockEngine(LLMEngine):
    """Behaves like an engine with a GPU, in real or faster time, and answers in words of the model's tokenizer.

    The same prompt and seed give the same answer. Sampling options other than the seed change nothing.
    """

    CAPABILITIES = CAPABILITIES
    ACCEPTED = ACCEPTED

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._running: dict[str, Running] = {}
        self._arrivals = 0
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._scheduler: Scheduler | None = None
        self._context_length = 0
        self._source = KvEventSource(rank=0)
        self._unpublished: list[KvEvent] = []
        self._step = Step()

    @classmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        if settings.role != "aggregated":
            raise invalid(f"The mock engine cannot play the role {settings.role}; use aggregated.", param="role")
        return cls(settings)

    async def start(self, worker_id: str) -> EngineConfig:
        settings = self._settings
        loaded = await asyncio.to_thread(_load, settings)
        # A sequence that fills the whole cache is the longest one that can ever finish.
        self._context_length = min(
            settings.context_length or loaded.context_length or DEFAULT_CONTEXT_LENGTH,
            settings.total_blocks * settings.block_size,
        )
        self._scheduler = Scheduler(
            BlockPool(settings.total_blocks),
            _timing(settings),
            loaded.storyteller.answer,
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
            vocab_size=loaded.vocabulary.size,
            block_size=settings.block_size,
            total_blocks=settings.total_blocks,
            max_sequences=settings.max_sequences,
            max_batched_tokens=settings.max_batched_tokens,
            eos_token_ids=loaded.vocabulary.eos_ids,
            capabilities=frozenset(CAPABILITIES),
            accepted=frozenset(ACCEPTED),
            adapters=tuple(settings.adapters),
            role=Role.AGGREGATED,
            engine="mock",
            engine_version=VERSION,
        )

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        room = self._context_length - len(request.token_ids)
        limit = room if request.stop.max_tokens is None else min(request.stop.max_tokens, room)
        if limit < 1:
            raise invalid(f"The prompt leaves no room in the context of {self._context_length} tokens.", param="prompt")
        sequence = Running(request, limit, self._arrivals, sink)
        self._started().submit(sequence)
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
        sequence = self._running.pop(context.request_id, None)
        if sequence is None:
            return
        # A step that is under way may have computed a token that nobody gets any more.
        undelivered = sum(1 for row, _ in self._step.rows if row is sequence)
        self._started().cancel(sequence)
        self._deliver_end(sequence, FinishReason.CANCELLED, sequence.usage(undelivered))
        self._note_idle()

    async def drain(self) -> None:
        await self._idle.wait()

    async def cleanup(self) -> None:
        await self.tasks.close()
        for request_id in tuple(self._running):
            self.abort(GenerateContext(request_id))

    def load(self) -> Sequence[Load]:
        return [Load() if self._scheduler is None else self._scheduler.load()]

    def kv_event_sources(self) -> Sequence[KvEventSource]:
        return (self._source,)

    async def clear_cache(self) -> None:
        pool = self._started().pool
        pool.clear()
        self._unpublished += pool.take_events()
        self._publish()

    def _started(self) -> Scheduler:
        if self._scheduler is None:
            raise SluiceError(ErrorKind.UNAVAILABLE, "The engine has not started yet.", code="engine_starting")
        return self._scheduler

    async def _run(self, scheduler: Scheduler) -> None:
        pacer = Pacer()
        while True:
            if not scheduler.busy:
                self._work.clear()
                await self._work.wait()
                pacer.resume()
            self._step = step = scheduler.step(pacer.now)
            self._unpublished += step.events
            await pacer.spend(step.duration_s)
            self._step = Step()
            self._emit(step)

    def _emit(self, step: Step) -> None:
        self._publish()
        for sequence, token_id in step.rows:
            sink = sequence.sink
            if sink is None:
                continue  # aborted while the step ran
            if sequence.known == sequence.prompt_tokens + 1:
                sink.begin(sequence.cached_tokens)
            sink.push((token_id,))
        for sequence in step.ended:
            if sequence.sink is not None and sequence.answer is not None:
                del self._running[sequence.request.request_id]
                answer = sequence.answer
                self._deliver_end(sequence, answer.reason, sequence.usage(), answer.stop_token_id)
        self._note_idle()

    def _publish(self) -> None:
        events, self._unpublished = self._unpublished, []
        if events:
            self._source.publish(events)

    def _deliver_end(
        self, sequence: Running, reason: FinishReason, usage: Usage, stop_token_id: int | None = None
    ) -> None:
        sink, sequence.sink = sequence.sink, None
        if sink is not None:
            sink.finish(reason, usage, stop_token_id=stop_token_id)

    def _note_idle(self) -> None:
        if not self._running:
            self._idle.set()


def _load(settings: WorkerSettings) -> _Loaded:
    path = models.resolve(settings.spec.source)
    processor = settings.spec.processor or models.detect_processor(path)
    # Whoever makes the ids, what an id means is in the files.
    vocabulary = load_vocabulary(path, processor if processor in models.PROCESSORS else models.detect_processor(path))
    return _Loaded(
        vocabulary, Storyteller(vocabulary), processor, models.fingerprint(path), declared_context_length(path)
    )


def _timing(settings: WorkerSettings) -> StepTiming:
    if settings.timing == "fixed":
        return FixedTiming(settings.fixed_step_ms, settings.fixed_prefill_us, settings.speedup)
    return ModelledTiming(settings.speedup)
