"""The transformers engine: requests in, steps of the batching thread out."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, ClassVar, Self

from services.common.errors import ErrorKind, SluiceError, invalid, not_found, overloaded
from services.common.hashing import seed_for
from services.worker.contract.cache_events import KvEventSource
from services.worker.contract.capabilities import SAMPLING, Capability
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import Embedded, EngineConfig, GenerateContext, LLMEngine, Load, Sink
from services.worker.contract.generation import Delta, FinishReason, GenerateRequest
from services.worker.engines.shared.download import download
from services.worker.engines.shared.grammar_compiler import GrammarCompiler
from services.worker.engines.transformers import guidance, options
from services.worker.engines.transformers.request_state import RequestState
from services.worker.engines.transformers.sampling import plan_of
from services.worker.engines.transformers.starting import Started, start_engine
from services.worker.engines.transformers.step import Listener, Step
from services.worker.settings import WorkerSettings

STOP_S = 3.0


class TransformersEngine(LLMEngine):
    """Serves any causal language model that transformers can batch continuously.

    The library's thread schedules and computes; this class lives on the event loop and hears from it once a step.
    """

    CAPABILITIES: ClassVar[frozenset[Capability]] = (
        (SAMPLING - {Capability.THINKING_TOKEN_BUDGET, Capability.ENGINE_OPTIONS})
        | guidance.KINDS
        | {
            Capability.TOKEN_IDS,
            Capability.LOGPROBS,
            Capability.PROMPT_LOGPROBS,
            Capability.PRIORITY,
            Capability.CACHE_SALT,
            Capability.LORA,
            Capability.LORA_LOADING,
            Capability.EMBEDDINGS,
            Capability.KV_EVENTS,
            Capability.CLEAR_CACHE,
        }
    )

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._options = options.read(settings.engine_args)
        self._live: dict[str, RequestState] = {}
        self._by_request: dict[str, RequestState] = {}
        self._keys = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self._source = KvEventSource(rank=0)
        self._started: Started | None = None
        self._stopping = False
        # Passes beside the steps share the cores with them: one at a time.
        self._passes = asyncio.Lock()
        self._compiling = GrammarCompiler(settings.grammar_timeout_s, settings.grammar_threads)

    @classmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        if settings.role != "aggregated":
            raise invalid(
                f"The transformers engine cannot play the role {settings.role}; use aggregated.", param="role"
            )
        if settings.engine_flags:
            raise invalid(
                "The transformers engine has no options after --; give them in --engine-args.", param="engine_args"
            )
        return cls(settings)

    async def start(self, worker_id: str) -> EngineConfig:
        loop = asyncio.get_running_loop()
        await download(self._settings.spec.source, self.on_phase)

        def tell(what: Callable[..., None], *arguments: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed: the process is about to end
                loop.call_soon_threadsafe(what, *arguments)

        listener = Listener(
            on_step=lambda step: tell(self._take, step),
            on_end=lambda: tell(self._thread_ended),
            on_phase=lambda phase: tell(self.on_phase, phase, None),
        )
        self._started = await asyncio.to_thread(start_engine, self._settings, self._options, listener)
        self._started.batcher.start()
        return self._started.config

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        started, settings = self._ready(), self._settings
        if len(self._live) >= started.config.max_sequences + settings.max_waiting:
            raise overloaded("The engine's queue is full.")
        room = started.config.context_length - len(request.token_ids)
        limit = room if request.stop.max_tokens is None else min(request.stop.max_tokens, room)
        if limit < 1:
            raise invalid(
                f"The prompt leaves no room in the context of {started.config.context_length} tokens.", param="prompt"
            )
        plan = plan_of(request, started.folder.generation, started.config.eos_token_ids)
        live = RequestState(str(next(self._keys)), request, sink, plan, limit)
        self._live[live.key] = self._by_request[request.request_id] = live
        self._idle.clear()
        if request.guided is None and request.prompt_logprobs is None:
            self._seat(started, live, None)
        else:
            self.tasks.spawn(self._prepare(started, live), f"prepare-{live.key}")

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
        live = self._by_request.get(context.request_id)
        if live is not None:
            self._ready().batcher.drop(live.key)
            self._end(live, FinishReason.CANCELLED)

    async def drain(self) -> None:
        await self._idle.wait()

    async def cleanup(self) -> None:
        self._stopping = True
        self._compiling.close()
        await self.tasks.close()
        for live in tuple(self._live.values()):
            self.abort(GenerateContext(live.request.request_id))
        if self._started is not None and self._started.batcher.alive:
            await asyncio.to_thread(self._started.batcher.stop, True, STOP_S, False, True)

    def load(self) -> Sequence[Load]:
        if self._started is None:
            return [Load()]
        gauges = self._started.batcher.gauges
        return [
            Load(
                running_requests=gauges.running,
                waiting_requests=max(0, len(self._live) - gauges.running),
                used_blocks=gauges.used_blocks,
                cached_blocks=gauges.cached_blocks,
                prefill_tokens=gauges.prefill_tokens,
                step_ms=gauges.step_ms,
            )
        ]

    def kv_event_sources(self) -> Sequence[KvEventSource]:
        return (self._source,)

    async def clear_cache(self) -> None:
        await asyncio.to_thread(self._ready().batcher.forget_prefixes)

    async def embed(self, inputs: Sequence[array[int]], dimensions: int, lora: str = "") -> Embedded:
        from services.worker.engines.transformers.embedding import embed

        started = self._ready()
        if not started.pooling:
            raise _cannot("This model's files do not say how it embeds; --engine-args pooling=mean or last does.")
        width = int(started.folder.config["hidden_size"])
        if dimensions > width:
            raise invalid(f"dimensions is {dimensions}; this model's embeddings have {width}.", param="dimensions")
        async with self._passes:
            vectors = await asyncio.to_thread(
                embed,
                started.model,
                inputs,
                started.pooling,
                started.folder.normalise,
                dimensions,
                started.config.max_batched_tokens,
                started.adapters,
                lora,
            )
        return Embedded(vectors, sum(map(len, inputs)))

    async def control(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        started = self._ready()
        if action == "load_lora":
            name, path = _argument(arguments, "name"), _argument(arguments, "path")
            self._refuse_in_use(name)
            await asyncio.to_thread(started.load_adapter, name, path)
        elif action == "unload_lora":
            name = _argument(arguments, "name")
            self._refuse_in_use(name)
            if name not in started.adapters.names:
                raise not_found(f"LoRA adapter {name!r} is not loaded.", param="name", code="adapter_not_found")
            await asyncio.to_thread(started.unload_adapter, name)
        else:
            return await super().control(action, arguments)
        return {"adapters": ",".join(started.adapters.names)}

    def _refuse_in_use(self, name: str) -> None:
        if any(live.request.lora == name for live in self._live.values()):
            raise _cannot(f"LoRA adapter {name!r} is in use; try again when its requests have ended.")

    def _ready(self) -> Started:
        if self._started is None:
            raise SluiceError(ErrorKind.UNAVAILABLE, "The engine has not started yet.", code="engine_starting")
        return self._started

    def _seat(self, started: Started, live: RequestState, constraint: Any) -> None:
        request = live.request
        seed = seed_for(request.lora, request.cache_salt)
        if not started.add(live.key, request, live.plan, constraint, seed, live.limit):
            self._end(live, FinishReason.ERROR, error=_gone())

    async def _prepare(self, started: Started, live: RequestState) -> None:
        """What takes a while before a request can be seated; it may be over by then."""
        try:
            constraint = None
            if live.request.guided is not None:
                constraint = await self._compiling.run(lambda: started.constraint(live.request))
            if live.request.prompt_logprobs is not None:
                async with self._passes:
                    live.prompt_logprobs = await asyncio.to_thread(started.score, live.request)
        except SluiceError as error:
            self._end(live, FinishReason.ERROR, error=error)
            return
        if live.key in self._live:
            self._seat(started, live, constraint)

    def _take(self, step: Step) -> None:
        """What the thread says of one step."""
        if step.events:
            self._source.publish(step.events)
        for row in step.rows:
            live = self._live.get(row.key)
            if live is None:
                continue  # aborted while the step ran
            if row.cached is not None:
                live.begin(row.cached)
            live.push(row.token_id, row.logprobs)
            if row.error:
                self._ready().batcher.drop(row.key)
                self._end(live, FinishReason.ERROR, error=_not_followed(row.error))
            elif row.ended:
                self._ready().batcher.seats.pop(row.key, None)
                self._end(live, live.reason)
        for key, _ in step.failed:
            if (live := self._live.get(key)) is not None:
                self._end(live, FinishReason.ERROR, error=_gone())

    def _end(self, live: RequestState, reason: FinishReason, error: SluiceError | None = None) -> None:
        if self._live.pop(live.key, None) is None:
            return
        del self._by_request[live.request.request_id]
        live.finish(reason, error)
        if not self._live:
            self._idle.set()

    def _thread_ended(self) -> None:
        if self._started is not None and not self._stopping:
            cause = self._started.batcher.background_thread_status.fatal_error
            self.on_failure("transformers-steps", cause or RuntimeError("the batching thread has ended"))


def _gone() -> SluiceError:
    return SluiceError(ErrorKind.ENGINE_SHUTDOWN, "The engine of this worker has stopped; another one can serve this.")


def _not_followed(reason: str) -> SluiceError:
    return invalid(f"The grammar in response_format cannot be followed any further: {reason}.", param="response_format")


def _cannot(message: str) -> SluiceError:
    return SluiceError(ErrorKind.FAILED_PRECONDITION, message, code="unsupported_by_engine")


def _argument(arguments: Mapping[str, str], name: str) -> str:
    if not arguments.get(name):
        raise invalid(f"This action needs the argument {name!r}.", param=name)
    return arguments[name]
