"""The sglang engine: sends requests to SGLang's schedulers and forwards their outputs to sinks."""

from __future__ import annotations

import asyncio
import itertools
import logging
from array import array
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Self

from services.common.base.errors import ErrorKind, SluiceError, internal, invalid, overloaded
from services.worker.contract.cache_events import KvEventSource
from services.worker.contract.capabilities import Capability
from services.worker.contract.engine import Embedded, EngineConfig, GenerateContext, Load, Sink
from services.worker.contract.generation import FinishReason, GenerateRequest
from services.worker.engines.inprocess.engine import InProcessEngine, embeddings_only, starting
from services.worker.engines.sglang import card
from services.worker.engines.sglang.controls import Controls
from services.worker.engines.sglang.handoff import BootstrapInfo, bootstrap_for
from services.worker.engines.sglang.metrics import SchedulerMetrics
from services.worker.engines.sglang.runtime import SglangRuntime
from services.worker.engines.shared.sglang_request_state import Chunk, RequestState, first_line
from services.worker.engines.shared.sglang_sampling import CAPABILITIES, Facts, engine_request
from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


class SglangEngine(InProcessEngine):
    """Hosts SGLang; its receiver passes chunks directly to sinks, so a token costs no task switch."""

    CAPABILITIES: ClassVar[frozenset[Capability]] = CAPABILITIES
    ACCEPTED: ClassVar[frozenset[Capability]] = frozenset({Capability.SEED})

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._runtime = SglangRuntime(settings)
        self._metrics = SchedulerMetrics()
        self._request_numbers = itertools.count(1)
        self._states: dict[str, RequestState] = {}
        self._request_tasks: dict[str, asyncio.Task[None]] = {}
        self._config: EngineConfig | None = None
        self._facts = Facts(0, {})

    @classmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        return cls(settings)

    async def start(self, worker_id: str) -> EngineConfig:
        runtime = self._runtime
        await runtime.start(self.on_phase, self.tasks, lambda name, error: self.on_failure(name, error))
        self._config = config = runtime.config()
        self._facts = card.request_facts(runtime.engine, config.context_length)
        runtime.events.open(config.block_size, self.tasks)
        if runtime.manager.enable_metrics:
            self.tasks.spawn(self._metrics.run(), "sglang-metrics")
        return config

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        config = self._started()
        manager = self._runtime.manager
        if not manager.is_generation:
            raise embeddings_only()
        if len(self._states) >= self._settings.max_waiting + max(config.max_sequences, 1) * config.data_parallel_size:
            raise overloaded(f"The engine's queue is full ({len(self._states)} requests in flight); try again later.")
        bootstrap = bootstrap_for(request, config.role, self._runtime.bootstrap_host, self._runtime.bootstrap_port)
        rid = f"{next(self._request_numbers):016x}"  # of fixed length, because SGLang aborts requests by id prefix
        fields = engine_request(request, rid, self._facts)
        if bootstrap is not None:
            fields |= bootstrap.fields()
        engine_input = self._runtime.sglang.GenerateReqInput(**fields)
        state = _request_state(request, rid, sink, config, bootstrap)
        manager.listeners[rid] = lambda chunk: self._take(state, chunk)
        self._states[request.request_id] = state
        self._request_tasks[rid] = self.tasks.spawn(self._run_request(state, engine_input), f"sglang-{rid}")
        if bootstrap is not None and not bootstrap.sent_tokens and config.role.name == "PREFILL":
            self._hand_over(state, bootstrap)

    def abort(self, context: GenerateContext) -> None:
        context.cancelled = True
        state = self._states.pop(context.request_id, None)
        if state is not None:
            state.end(FinishReason.CANCELLED)
            self._stop(state)

    async def drain(self) -> None:
        while self._request_tasks:
            await asyncio.wait(list(self._request_tasks.values()))

    async def cleanup(self) -> None:
        for request_id in tuple(self._states):
            self.abort(GenerateContext(request_id))
        await self.tasks.close()
        await self._runtime.close()

    def load(self) -> Sequence[Load]:
        return self._runtime.load() if self._config is not None else [Load()]

    def kv_event_sources(self) -> Sequence[KvEventSource]:
        has_events = self._config is not None and Capability.KV_EVENTS in self._config.capabilities
        return self._runtime.events.sources if has_events else ()

    async def clear_cache(self) -> None:
        await self._controls().clear_cache()

    async def control(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        return await self._controls().run(action, arguments)

    def metrics_text(self) -> str:
        return self._metrics.text

    async def embed(self, inputs: Sequence[array[int]], dimensions: int, lora: str = "") -> Embedded:
        self._started()
        manager = self._runtime.manager
        if manager.is_generation:
            return await super().embed(inputs, dimensions, lora)
        engine_input = self._runtime.sglang.EmbeddingReqInput(
            rid=[f"{next(self._request_numbers):016x}" for _ in inputs],
            input_ids=[token_ids.tolist() for token_ids in inputs],
            dimensions=dimensions or None,
            lora_path=[lora] * len(inputs) if lora else None,
        )
        try:
            async with aclosing(manager.generate_request(engine_input)) as responses:
                embeddings = await anext(responses)
        except ValueError as error:
            raise invalid(f"SGLang rejected the inputs: {error}", param="input") from error
        vectors = [array("f", item["embedding"]).tobytes() for item in embeddings]
        return Embedded(vectors, sum(len(token_ids) for token_ids in inputs))

    async def _run_request(self, state: RequestState, engine_input: Any) -> None:
        try:
            async with aclosing(self._runtime.manager.generate_request(engine_input)) as chunks:
                async for chunk in chunks:
                    state.take(chunk)
            message = "SGLang ended the generation without a finish reason."
            state.end(FinishReason.ERROR, error=SluiceError(ErrorKind.STREAM_INCOMPLETE, message))
        except SluiceError as error:
            state.end(FinishReason.ERROR, error=error)
        except ValueError as error:
            state.end(FinishReason.ERROR, error=invalid(f"SGLang rejected the request: {first_line(str(error))}"))
        except Exception:
            log.exception("SGLang failed", extra={"request": state.request.request_id})
            state.end(FinishReason.ERROR, error=internal("SGLang failed on this request."))
        finally:
            self._runtime.manager.listeners.pop(state.rid, None)
            self._request_tasks.pop(state.rid, None)
            if self._states.get(state.request.request_id) is state:
                del self._states[state.request.request_id]

    def _take(self, state: RequestState, chunk: Chunk) -> None:
        """Handles a chunk; exceptions end only this request, because all requests share SGLang's receiver."""
        try:
            state.take(chunk)
        except SluiceError as error:
            state.end(FinishReason.ERROR, error=error)
        except Exception:
            log.exception("failed to process a chunk of SGLang", extra={"request": state.request.request_id})
            state.end(FinishReason.ERROR, error=internal("The engine returned an invalid output."))
        if state.ended:
            self._stop(state)

    def _stop(self, state: RequestState) -> None:
        """Cancels the request's task; SGLang then aborts the request and tracks it until its scheduler confirms."""
        self._runtime.manager.listeners.pop(state.rid, None)
        if task := self._request_tasks.get(state.rid):
            task.cancel()

    def _hand_over(self, state: RequestState, bootstrap: BootstrapInfo) -> None:
        """Ends a request for its caller while SGLang waits for the decode worker to fetch the cache."""
        del self._states[state.request.request_id]
        self._runtime.manager.listeners.pop(state.rid, None)
        state.end(FinishReason.HANDOFF, handoff=bootstrap.pack())

    def _controls(self) -> Controls:
        self._started()
        return Controls(self._runtime.sglang, self._runtime.manager)

    def _started(self) -> EngineConfig:
        if self._config is None:
            raise starting()
        return self._config


def _request_state(
    request: GenerateRequest, rid: str, sink: Sink, config: EngineConfig, bootstrap: BootstrapInfo | None
) -> RequestState:
    if bootstrap is None:
        return RequestState(request, rid, sink)
    if config.role.name == "PREFILL":
        return RequestState(request, rid, sink, handoff=bootstrap.pack())
    return RequestState(request, rid, sink, skip=bootstrap.sent_tokens)
