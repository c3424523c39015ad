"""The transformers engine: submits requests to the batching thread and forwards its steps to sinks."""

from __future__ import annotations

import asyncio
import itertools
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Self

from services.common.base.errors import ErrorKind, SluiceError, invalid, not_found, overloaded
from services.common.base.shared_steps import shared_step
from services.common.types.hashing import seed_for
from services.worker.contract.cache_events import KvEventSource
from services.worker.contract.capabilities import Capability
from services.worker.contract.engine import Embedded, EngineConfig, GenerateContext, Load, Sink
from services.worker.contract.generation import FinishReason, GenerateRequest
from services.worker.engines.inprocess.engine import InProcessEngine, starting
from services.worker.engines.shared.download import download
from services.worker.engines.shared.grammar_compiler import GrammarCompiler
from services.worker.engines.transformers import options
from services.worker.engines.transformers.picture_queue import PictureQueue
from services.worker.engines.transformers.request_state import RequestState
from services.worker.engines.transformers.sampling import plan_of
from services.worker.engines.transformers.starting import CAPABILITIES, Started, start_engine
from services.worker.engines.transformers.step import Listener, Step, StepRow
from services.worker.engines.transformers.step_errors import row_failed
from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 3.0
MAX_ENCODED = 4
"""Requests whose pictures are encoded before they run; further ones wait."""


class TransformersEngine(InProcessEngine):
    """Serves causal language models by transformers' continuous batching, and models that take images step by step.

    A `StepRunner`'s thread schedules and computes; this class runs on the event loop and is notified once per step.
    """

    CAPABILITIES: ClassVar[frozenset[Capability]] = CAPABILITIES

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._options = options.read(settings.engine_args)
        self._states_by_key: dict[str, RequestState] = {}
        self._states_by_request: dict[str, RequestState] = {}
        self._keys = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self._source = KvEventSource(rank=0)
        self._started: Started | None = None
        self._stopping = False
        # Forward passes outside the steps compete with them for the device, so they run one at a time.
        self._extra_pass = asyncio.Lock()
        self._pictures = PictureQueue(MAX_ENCODED)
        self._grammars = GrammarCompiler()

    @classmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        if settings.role != "aggregated":
            raise invalid(
                f"The transformers engine does not support the role {settings.role}; use aggregated.", param="role"
            )
        if settings.engine_flags:
            raise invalid(
                "The transformers engine accepts no options after --; use --engine-args.", param="engine_args"
            )
        return cls(settings)

    async def start(self, worker_id: str) -> EngineConfig:
        loop = asyncio.get_running_loop()
        await download(self._settings.spec.source, self.on_phase)

        def call_in_loop(callback: Callable[..., None], *arguments: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed, because the process is exiting
                loop.call_soon_threadsafe(callback, *arguments)

        listener = Listener(
            on_step=lambda step: call_in_loop(self._take, step),
            on_end=lambda: call_in_loop(self._on_thread_exit),
            on_phase=lambda phase: call_in_loop(self.on_phase, phase, None),
        )
        self._started = await asyncio.to_thread(start_engine, self._settings, self._options, listener)
        self._started.runner.start()
        return self._started.config

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        started, settings = self._ready(), self._settings
        if len(self._states_by_key) >= started.config.max_sequences + settings.max_waiting:
            raise overloaded("The engine's queue is full; try again later.")
        room = started.config.context_length - len(request.token_ids)
        limit = room if request.stop.max_tokens is None else min(request.stop.max_tokens, room)
        if limit < 1:
            raise invalid(
                f"The prompt leaves no room in the context of {started.config.context_length} tokens; shorten it.",
                param="prompt",
            )
        started.check_media(request)
        plan = plan_of(request, started.folder.generation, started.config.eos_token_ids)
        state = RequestState(str(next(self._keys)), request, sink, plan, limit)
        self._states_by_key[state.key] = self._states_by_request[request.request_id] = state
        self._idle.clear()
        if request.guided is None and request.prompt_logprobs is None and not request.media:
            try:
                self._add(started, state, None)
            except Exception:
                self._forget(state)
                raise
        else:
            self.tasks.spawn(self._prepare(started, state), f"prepare-{state.key}")

    def abort(self, context: GenerateContext) -> None:
        context.cancelled = True
        state = self._states_by_request.get(context.request_id)
        if state is not None:
            self._ready().runner.drop(state.key)
            self._end(state, FinishReason.CANCELLED)

    async def drain(self) -> None:
        await self._idle.wait()

    async def cleanup(self) -> None:
        self._stopping = True
        self._grammars.close()
        self._pictures.close()
        await self.tasks.close()
        for state in tuple(self._states_by_key.values()):
            self.abort(GenerateContext(state.request.request_id))
        if self._started is not None and self._started.runner.alive:
            await asyncio.to_thread(self._started.runner.close, STOP_TIMEOUT_S)

    def load(self) -> Sequence[Load]:
        if self._started is None:
            return [Load()]
        gauges = self._started.runner.gauges
        return [
            Load(
                running_requests=gauges.running,
                waiting_requests=max(0, len(self._states_by_key) - gauges.running),
                used_blocks=gauges.used_blocks,
                cached_blocks=gauges.cached_blocks,
                prefill_tokens=gauges.prefill_tokens,
                step_ms=gauges.step_ms,
            )
        ]

    def kv_event_sources(self) -> Sequence[KvEventSource]:
        return (self._source,)

    async def clear_cache(self) -> None:
        await asyncio.to_thread(self._ready().runner.forget_prefixes)

    async def embed(self, inputs: Sequence[array[int]], dimensions: int, lora: str = "") -> Embedded:
        from services.worker.engines.transformers.embedding import embed

        started = self._ready()
        if not started.pooling:
            raise _cannot(
                "This model's files define no pooling; start the worker with --engine-args pooling=mean or last."
            )
        width = int(started.folder.config["hidden_size"])
        if dimensions > width:
            raise invalid(
                f"dimensions is {dimensions}; use at most {width}, the size of this model's embeddings.",
                param="dimensions",
            )
        async with self._extra_pass:
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
            self._check_unused(name)
            await asyncio.to_thread(started.load_adapter, name, path)
        elif action == "unload_lora":
            name = _argument(arguments, "name")
            self._check_unused(name)
            if name not in started.adapters.names:
                raise not_found(
                    f"LoRA adapter {name!r} is not loaded; load it first.", param="name", code="adapter_not_found"
                )
            await asyncio.to_thread(started.unload_adapter, name)
        else:
            return await super().control(action, arguments)
        return {"adapters": ",".join(started.adapters.names)}

    def _check_unused(self, name: str) -> None:
        if any(state.request.lora == name for state in self._states_by_key.values()):
            raise _cannot(f"LoRA adapter {name!r} is in use; try again when its requests have completed.")

    def _ready(self) -> Started:
        if self._started is None:
            raise starting()
        return self._started

    def _add(self, started: Started, state: RequestState, constraint: Any, pictures: Any = None) -> None:
        request = state.request
        seed = seed_for(request.lora, request.cache_salt)
        if not started.add(state.key, request, state.plan, constraint, seed, state.limit, pictures):
            self._end(state, FinishReason.ERROR, error=_stopped())

    async def _prepare(self, started: Started, state: RequestState) -> None:
        """Prepares the prompt and the grammar off the event loop, then adds the request unless it has ended."""
        request = state.request
        try:
            constraint = pictures = None
            if request.media:
                wanted = partial(self._states_by_key.__contains__, state.key)
                pictures = await self._pictures.encode(state.key, wanted, lambda: started.encode(request))
            if request.guided is not None:
                constraint = await self._grammars.run(lambda: started.constraint(request))
            if request.prompt_logprobs is not None:
                async with self._extra_pass:
                    state.prompt_logprobs = await asyncio.to_thread(started.score, request)
            if state.key in self._states_by_key:
                self._add(started, state, constraint, pictures)
            else:
                self._pictures.release(state.key)
        except Exception as error:
            if not isinstance(error, SluiceError):
                log.exception("preparing a request failed", extra={"request": request.request_id})
            self._end(state, FinishReason.ERROR, error=row_failed(error))

    @shared_step("transformers.rows")
    def _take(self, step: Step) -> None:
        """Forwards the output of one step; what one row raises ends only its request."""
        if step.events:
            self._source.publish(step.events)
        for row in step.rows:
            state = self._states_by_key.get(row.key)
            if state is None:
                continue  # aborted during the step
            try:
                self._take_row(state, row)
            except Exception as error:
                log.exception("a row of a step failed", extra={"request": state.request.request_id})
                self._ready().runner.drop(row.key)
                self._end(state, FinishReason.ERROR, error=row_failed(error))
        for key, failure in step.failed:
            if (state := self._states_by_key.get(key)) is not None:
                cause = failure if isinstance(failure, SluiceError) else _stopped()
                self._end(state, FinishReason.ERROR, error=cause)

    def _take_row(self, state: RequestState, row: StepRow) -> None:
        if row.cached_tokens is not None:
            state.begin(row.cached_tokens)
            self._pictures.release(row.key)
        state.push(row.token_id, row.logprobs)
        if row.error:
            self._ready().runner.drop(row.key)
            message = (
                f"Generation cannot continue under the grammar in response_format: {row.error}; simplify the grammar."
            )
            self._end(state, FinishReason.ERROR, error=invalid(message, param="response_format"))
        elif row.ended:
            self._ready().runner.release(row.key)
            self._end(state, state.reason)

    def _end(self, state: RequestState, reason: FinishReason, error: SluiceError | None = None) -> None:
        if self._forget(state):
            state.finish(reason, error)

    def _forget(self, state: RequestState) -> bool:
        """Removes a request; returns False if it was removed before."""
        if self._states_by_key.pop(state.key, None) is None:
            return False
        del self._states_by_request[state.request.request_id]
        self._pictures.release(state.key)
        if not self._states_by_key:
            self._idle.set()
        return True

    def _on_thread_exit(self) -> None:
        if self._started is not None and not self._stopping:
            cause = self._started.runner.fatal_error
            self.on_failure("transformers-steps", cause or RuntimeError("the thread of the steps exited"))


def _stopped() -> SluiceError:
    return SluiceError(ErrorKind.ENGINE_SHUTDOWN, "The engine of this worker has stopped; retry on another worker.")


def _cannot(message: str) -> SluiceError:
    return SluiceError(ErrorKind.FAILED_PRECONDITION, message, code="unsupported_by_engine")


def _argument(arguments: Mapping[str, str], name: str) -> str:
    if not arguments.get(name):
        raise invalid(f"Missing argument {name!r}; send it with the action.", param=name)
    return arguments[name]
