"""The sglang engine: requests go to SGLang's schedulers and tokens come back a batch at a time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Self

from services.common.errors import ErrorKind, SluiceError, internal, invalid, overloaded
from services.worker.contract.cache_events import KvEventSource
from services.worker.contract.capabilities import Capability
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import Embedded, EngineConfig, GenerateContext, LLMEngine, Load, Sink
from services.worker.contract.generation import Delta, FinishReason, GenerateRequest
from services.worker.engines.sglang import card
from services.worker.engines.sglang.controls import Controls
from services.worker.engines.sglang.handoff import BootstrapInfo, meeting_of
from services.worker.engines.sglang.metrics import SchedulerMetrics
from services.worker.engines.sglang.request_state import Chunk, RequestState, first_line
from services.worker.engines.sglang.runtime import SglangRuntime
from services.worker.engines.sglang.sampling import Facts, engine_request
from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


class SglangEngine(LLMEngine):
    """One SGLang engine; a token costs the worker no task switch, for chunks go from SGLang's receiver into sinks."""

    CAPABILITIES: ClassVar[frozenset[Capability]] = card.CAPABILITIES
    ACCEPTED: ClassVar[frozenset[Capability]] = frozenset({Capability.SEED})

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._hosted = SglangRuntime(settings)
        self._metrics = SchedulerMetrics()
        self._numbers = itertools.count(1)
        self._states: dict[str, RequestState] = {}
        self._tasks_of: dict[str, asyncio.Task[None]] = {}
        self._config: EngineConfig | None = None
        self._facts = Facts(0, {})

    @classmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        return cls(settings)

    async def start(self, worker_id: str) -> EngineConfig:
        hosted = self._hosted
        await hosted.start(self.on_phase, self.tasks, lambda name, error: self.on_failure(name, error))
        self._config = config = hosted.config()
        self._facts = card.request_facts(hosted.engine, config.context_length)
        hosted.events.open(config.block_size, self.tasks)
        if hosted.manager.enable_metrics:
            self.tasks.spawn(self._metrics.run(), "sglang-metrics")
        return config

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        config = self._started()
        manager = self._hosted.manager
        if not manager.is_generation:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "This worker computes embeddings only.",
                param="model",
                code="unsupported_by_engine",
            )
        if len(self._states) >= self._settings.max_waiting + max(config.max_sequences, 1) * config.data_parallel_size:
            raise overloaded(f"The engine's queue is full: {len(self._states)} requests are alive already.")
        meeting = meeting_of(request, config.role, self._hosted.bootstrap_host, self._hosted.bootstrap_port)
        rid = f"{next(self._numbers):016x}"  # of one length: SGLang aborts every request whose name begins alike
        fields = engine_request(request, rid, self._facts)
        if meeting is not None:
            fields |= meeting.fields()
        asked = self._hosted.sglang.GenerateReqInput(**fields)
        state = _flight(request, rid, sink, config, meeting)
        manager.listeners[rid] = lambda chunk: self._take(state, chunk)
        self._states[request.request_id] = state
        self._tasks_of[rid] = self.tasks.spawn(self._fly(state, asked), f"sglang-{rid}")
        if meeting is not None and not meeting.told and config.role.name == "PREFILL":
            self._hand_over(state, meeting)

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
        state = self._states.pop(context.request_id, None)
        if state is not None:
            state.end(FinishReason.CANCELLED)
            self._stop(state)

    async def drain(self) -> None:
        while self._tasks_of:
            await asyncio.wait(list(self._tasks_of.values()))

    async def cleanup(self) -> None:
        for request_id in tuple(self._states):
            self.abort(GenerateContext(request_id))
        await self.tasks.close()
        await self._hosted.close()

    def load(self) -> Sequence[Load]:
        return self._hosted.load() if self._config is not None else [Load()]

    def kv_event_sources(self) -> Sequence[KvEventSource]:
        able = self._config is not None and Capability.KV_EVENTS in self._config.capabilities
        return self._hosted.events.sources if able else ()

    async def clear_cache(self) -> None:
        await self._controls().clear_cache()

    async def control(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        return await self._controls().run(action, arguments)

    def metrics_text(self) -> str:
        return self._metrics.text

    async def embed(self, inputs: Sequence[array[int]], dimensions: int, lora: str = "") -> Embedded:
        self._started()
        manager = self._hosted.manager
        if manager.is_generation:
            return await super().embed(inputs, dimensions, lora)
        asked = self._hosted.sglang.EmbeddingReqInput(
            rid=[f"{next(self._numbers):016x}" for _ in inputs],
            input_ids=[one.tolist() for one in inputs],
            dimensions=dimensions or None,
            lora_path=[lora] * len(inputs) if lora else None,
        )
        try:
            async with aclosing(manager.generate_request(asked)) as answers:
                found = await anext(answers)
        except ValueError as error:
            raise invalid(f"SGLang refused the inputs: {error}", param="input") from error
        vectors = [array("f", one["embedding"]).tobytes() for one in found]
        return Embedded(vectors, sum(len(one) for one in inputs))

    async def _fly(self, state: RequestState, asked: Any) -> None:
        try:
            async with aclosing(self._hosted.manager.generate_request(asked)) as chunks:
                async for chunk in chunks:
                    state.take(chunk)
            state.end(FinishReason.ERROR, error=_incomplete())
        except SluiceError as error:
            state.end(FinishReason.ERROR, error=error)
        except ValueError as error:
            state.end(FinishReason.ERROR, error=invalid(f"SGLang refused the request: {first_line(str(error))}"))
        except Exception:
            log.exception("SGLang failed", extra={"request": state.request.request_id})
            state.end(FinishReason.ERROR, error=internal("SGLang failed on this request."))
        finally:
            self._hosted.manager.listeners.pop(state.rid, None)
            self._tasks_of.pop(state.rid, None)
            if self._states.get(state.request.request_id) is state:
                del self._states[state.request.request_id]

    def _take(self, state: RequestState, chunk: Chunk) -> None:
        """Called by SGLang's receiver, which serves all requests: nothing may escape."""
        try:
            state.take(chunk)
        except Exception:
            log.exception("a chunk of SGLang cannot be read", extra={"request": state.request.request_id})
            state.end(FinishReason.ERROR, error=internal("The engine's answer cannot be read."))
        if state.ended:
            self._stop(state)

    def _stop(self, state: RequestState) -> None:
        """SGLang aborts a request whose task is cancelled, and keeps its own account until its scheduler agrees."""
        self._hosted.manager.listeners.pop(state.rid, None)
        if task := self._tasks_of.get(state.rid):
            task.cancel()

    def _hand_over(self, state: RequestState, meeting: BootstrapInfo) -> None:
        """Ends a request for its caller while SGLang waits for the decode side to fetch the cache."""
        del self._states[state.request.request_id]
        self._hosted.manager.listeners.pop(state.rid, None)
        state.end(FinishReason.HANDOFF, handoff=meeting.pack())

    def _controls(self) -> Controls:
        self._started()
        return Controls(self._hosted.sglang, self._hosted.manager)

    def _started(self) -> EngineConfig:
        if self._config is None:
            raise SluiceError(ErrorKind.UNAVAILABLE, "The engine has not started yet.", code="engine_starting")
        return self._config


def _flight(
    request: GenerateRequest, rid: str, sink: Sink, config: EngineConfig, meeting: BootstrapInfo | None
) -> RequestState:
    if meeting is None:
        return RequestState(request, rid, sink)
    if config.role.name == "PREFILL":
        return RequestState(request, rid, sink, handoff=meeting.pack())
    return RequestState(request, rid, sink, skip=meeting.told)


def _incomplete() -> SluiceError:
    return SluiceError(ErrorKind.STREAM_INCOMPLETE, "SGLang ended the generation without a finish reason.")
