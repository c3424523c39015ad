"""The worker: one engine, its running requests, and their lifecycle from admission to drain."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from services.common.base.budgets import Budget
from services.common.base.errors import NOT_STARTED, SHUTTING_DOWN, ErrorKind, SluiceError, internal, invalid
from services.common.observability import telemetry
from services.worker.contract.capabilities import Capability
from services.worker.contract.engine import EngineConfig, GenerateContext, LLMEngine, Load
from services.worker.contract.generation import FinishReason, GenerateRequest, MediaKind, MediaSpan, Role, Usage
from services.worker.contract.handoff import opened, seal
from services.worker.generation.response_sink import ResponseSink, SinkParams
from services.worker.generation.tracing import open_span
from services.worker.generation.validation import (
    require,
    usable_defaults,
    validate,
    validate_grammar_size,
    without_unknown_eos,
)
from services.worker.media.store import MediaStore
from services.worker.metrics import WorkerMetrics
from services.worker.serving.admission_gate import AdmissionGate
from services.worker.serving.processing import local_processing
from services.worker.serving.status import WorkerStatus
from services.worker.settings import ProcessingOptions

log = logging.getLogger(__name__)

CLEANUP_S = 5.0


class Worker:
    """Owns one engine and all running requests on it.

    Args:
        engine: constructed, not started.
        worker_id: unique name.
        on_failure: called when the engine has failed permanently.
        max_live: limit of concurrent requests; 0: no limit.
        strict: raise contract violations into the engine.
        processing: tokenization and detokenization in the worker process; by default none.
        grammar: limit on the characters of a grammar; by default none.
        media_bytes: most bytes of media files that are kept.
        max_media_bytes: most bytes of one media file.

    Attributes:
        epoch: greater at every start; in microseconds, because a store may represent numbers as doubles.
        loaded_unix_s: when the engine became ready, Unix seconds.
        draining: whether the worker is leaving discovery; after `refuse_new`, it rejects requests.
        phases: the current phase while the worker is not serving.
        gate: admission of requests.
        on_card: called when the model card has changed.
        last_finished_s: when a generation last finished without an error, monotonic seconds.
    """

    def __init__(
        self,
        engine: LLMEngine,
        worker_id: str,
        on_failure: Callable[[str, BaseException], None] | None = None,
        *,
        max_live: int = 0,
        strict: bool = False,
        processing: ProcessingOptions | None = None,
        grammar: Budget | None = None,
        media_bytes: int = 256 << 20,
        max_media_bytes: int = 32 << 20,
    ) -> None:
        self.engine = engine
        self.processing = local_processing(processing or ProcessingOptions("none"), self._task_failed)
        self.worker_id = worker_id
        self.epoch = time.time_ns() // 1000
        self.loaded_unix_s = 0
        self.draining = False
        self.phases = WorkerStatus()
        self.gate = AdmissionGate(self.phases, max_live)
        self.on_card: Callable[[], None] = lambda: None
        self.last_finished_s = time.monotonic()
        self._delivered_to_ended = 0  # tokens delivered to requests that have ended
        self.media = MediaStore(media_bytes)
        self.max_media_bytes = max_media_bytes
        self._strict = strict
        self._grammar = grammar
        self._config: EngineConfig | None = None
        self._live: dict[str, ResponseSink] = {}
        self.metrics = WorkerMetrics(self.load, self._total_blocks)
        self._report_failure = on_failure
        engine.on_failure = self._engine_failed
        engine.on_phase = self.phases.enter

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration; raises SluiceError (UNAVAILABLE) until the engine has started."""
        if self._config is None:
            raise self.gate.refusal or SluiceError(ErrorKind.UNAVAILABLE, "The worker is still starting.")
        return self._config

    @property
    def started(self) -> bool:
        """Whether the engine has been loaded."""
        return self._config is not None

    @property
    def takes_media(self) -> bool:
        """Whether the engine takes media items of any kind."""
        return self._config is not None and any(kind.capability in self._config.capabilities for kind in MediaKind)

    def require_media(self, spans: Sequence[MediaSpan]) -> None:
        """Raises SluiceError unless the engine takes items of these kinds, or while it is not ready."""
        for kind in {span.kind for span in spans}:
            require(Capability(kind.capability), self.config, "media")

    @property
    def live_requests(self) -> int:
        """Number of requests without a terminal delta."""
        return len(self._live)

    @property
    def delivered_tokens(self) -> int:
        """Number of tokens delivered to callers since the start, without those of canaries."""
        return self._delivered_to_ended + sum(sink.delivered for sink in self._live.values())

    def load(self) -> Sequence[Load]:
        """Returns the current load of every data-parallel rank."""
        return self.engine.load() if self._config is not None else [Load()]

    async def start(self, chat_template: str = "", tool_parser: str = "", reasoning_parser: str = "") -> EngineConfig:
        """Starts the engine and opens admission; non-empty arguments override the engine's values on the model card.

        Raises:
            SluiceError: the engine or the tokenizer cannot be loaded.
        """
        self.phases.enter("starting the engine")
        config = usable_defaults(await _start_engine(self.engine, self.worker_id))
        self.phases.enter("loading the tokenizer")
        self._config = await self.processing.start(
            replace(
                config,
                engine=config.engine or type(self.engine).__name__,
                chat_template=chat_template or config.chat_template,
                tool_parser=tool_parser or config.tool_parser,
                reasoning_parser=reasoning_parser or config.reasoning_parser,
            )
        )
        self.loaded_unix_s = int(time.time())
        self.last_finished_s = time.monotonic()
        self.gate.open()
        log.info("engine is ready", extra={"engine": self._config.engine, "model": self._config.model})
        return self._config

    def submit(self, request: GenerateRequest, sink: ResponseSink, trace: Mapping[str, str] | None = None) -> None:
        """Validates a request and submits it to the engine; `sink` then receives exactly one terminal delta.

        Raises:
            SluiceError: the request was rejected; `sink` receives nothing.
        """
        try:
            self.gate.check()
            config = self.config
            if request.guided is not None and self._grammar is not None:
                validate_grammar_size(request.guided, self._grammar)
            request = without_unknown_eos(request, config)
            validate(request, config)
            if request.request_id in self._live:
                raise invalid(
                    f"A request with id {request.request_id!r} is already running; use a unique id.",
                    param="request_id",
                    code="duplicate_request_id",
                )
            request = _with_defaults(request, config)
            if self.processing.makes_prompt_of(request):
                self._prepare(request, sink, trace or {})
            else:
                self._submit_to_engine(request, sink, trace or {})
        except SluiceError as error:
            self._refuse(request, sink, error)
            raise
        except Exception as error:
            log.exception("failed to start a request", extra={"request": request.request_id})
            refusal = internal("The worker failed to start this request; see its log.")
            self._refuse(request, sink, refusal)
            raise refusal from error

    def _refuse(self, request: GenerateRequest, sink: ResponseSink, error: SluiceError) -> None:
        if self._live.get(request.request_id) is sink:
            sink.refuse(error)
            self._forget(request.request_id)
        self.metrics.record_refusal(error.kind.name.lower())

    def change_card(self, config: EngineConfig) -> None:
        """Replaces the configuration within the same epoch."""
        self._config = config
        self.on_card()

    def _prepare(self, request: GenerateRequest, sink: ResponseSink, trace: Mapping[str, str]) -> None:
        """Tokenizes the prompt, then submits the request to the engine; it counts as running meanwhile."""
        self._live[request.request_id] = sink
        self.gate.count(len(self._live))
        sink.accept(GenerateContext(request.request_id, trace), 0, SinkParams(self._ended, self._violation), None)

        def submit_prepared(prepared: GenerateRequest) -> None:
            sink.prepared_prompt = prepared.token_ids
            self._submit_to_engine(without_unknown_eos(prepared, self.config), sink, trace)

        self.processing.begin(request, submit_prepared, sink.fail)

    def _submit_to_engine(self, request: GenerateRequest, sink: ResponseSink, trace: Mapping[str, str]) -> None:
        config = self.config
        request, prefill_traceparent = opened(_with_bootstrap(request, config))
        span = open_span(request, config.role, trace, prefill_traceparent)
        context = GenerateContext(request.request_id, trace if span is None else span.carrier)
        params = SinkParams(
            self._ended,
            self._violation,
            lambda payload, traceparent: seal(request, self.worker_id, self.epoch, traceparent, payload),
            config.vocab_size,
            self._strict,
        )
        self._live[request.request_id] = sink
        self.gate.count(len(self._live))
        sink.accept(context, len(request.token_ids), params, span)
        try:
            engine_sink = self.processing.sink(request, sink, params, lambda: self._abort(sink))
            # The task that runs the engine's `generate` is created in this block and inherits the span.
            with telemetry.activate(None) if span is None else span.active():
                self.engine.submit(request, context, engine_sink)
        except SluiceError:
            raise
        except Exception as error:
            log.exception("engine failed to accept a request", extra={"request": request.request_id})
            raise internal("The engine failed on this request; see the worker's log.") from error

    def cancel(self, sink: ResponseSink) -> None:
        """Aborts a request; the engine stops within a step and `sink` receives CANCELLED."""
        if sink.ended:
            return
        if self.processing.give_up(sink.context.request_id):
            sink.withdraw()
        else:
            self._abort(sink)

    def fail(self, sink: ResponseSink, error: SluiceError) -> None:
        """Ends a request with an error of the worker and aborts it in the engine."""
        sink.fail(error)
        self._abort(sink)

    def _abort(self, sink: ResponseSink) -> None:
        try:
            self.engine.abort(sink.context)
        except Exception:
            log.exception("engine failed to abort a request", extra={"request": sink.context.request_id})
            sink.fail(internal("The engine failed to abort this request; see the worker's log."))

    def _total_blocks(self) -> list[int]:
        config = self._config
        return [] if config is None else [config.total_blocks] * config.data_parallel_size

    def fail_all(self, error: SluiceError) -> None:
        """Ends every running request with `error`."""
        for sink in tuple(self._live.values()):
            self.fail(sink, error)

    def abort(self, request_id: str) -> bool:
        """Cancels the request with this id; returns False when it is not running."""
        sink = self._live.get(request_id)
        if sink is None:
            return False
        self.cancel(sink)
        return True

    async def wait_idle(self) -> None:
        """Returns when no request is running; the caller sets the deadline."""
        await self.gate.idle.wait()

    def refuse_new(self) -> None:
        """Rejects new requests with ENGINE_SHUTDOWN, which callers retry on another worker."""
        self.gate.close(_shutting_down())

    async def drain(self, timeout_s: float) -> None:
        """Waits for running requests; those that exceed the timeout fail with ENGINE_SHUTDOWN."""
        self.refuse_new()
        try:
            async with asyncio.timeout(timeout_s):
                await self.gate.idle.wait()
                await self.engine.drain()
        except TimeoutError:
            log.warning("drain timed out; failing the remaining requests", extra={"requests": len(self._live)})
            self.fail_all(_shutting_down())

    async def cleanup(self) -> None:
        """Releases the engine's resources, within a deadline."""
        try:
            async with asyncio.timeout(CLEANUP_S):
                await self.engine.cleanup()
        except TimeoutError:
            log.warning("engine cleanup timed out", extra={"seconds": CLEANUP_S})
        await self.processing.close()

    def _engine_failed(self, name: str, error: BaseException) -> None:
        self.gate.close(
            SluiceError(
                ErrorKind.ENGINE_SHUTDOWN,
                "The engine of this worker has failed; send the request to another worker.",
                code=NOT_STARTED,
            )
        )
        self.fail_all(SluiceError(ErrorKind.ENGINE_SHUTDOWN, "The engine of this worker has failed."))
        if self._report_failure is not None:
            self._report_failure(name, error)

    def _task_failed(self, name: str, error: BaseException) -> None:
        if self._report_failure is not None:
            self._report_failure(name, error)

    def _violation(self, sink: ResponseSink, rule: str) -> None:
        self.metrics.record_broken_contract(rule)
        if not sink.ended:
            self.fail(sink, internal("The engine broke its contract on this request; see the worker's log."))

    def _ended(self, sink: ResponseSink, reason: FinishReason, usage: Usage) -> None:
        self._forget(sink.context.request_id)
        now, first = time.monotonic(), sink.first_token_s
        self._delivered_to_ended += sink.delivered
        if not sink.overruled and reason not in (FinishReason.ERROR, FinishReason.CANCELLED):
            self.last_finished_s = now
        self.metrics.record(reason, usage, None if first is None else first - sink.started_s, now - sink.started_s)

    def _forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self.processing.forget(request_id)
        self.gate.count(len(self._live))


def _shutting_down() -> SluiceError:
    return SluiceError(
        ErrorKind.ENGINE_SHUTDOWN,
        "The worker is shutting down; send the request to another worker.",
        code=SHUTTING_DOWN,
    )


async def _start_engine(engine: LLMEngine, worker_id: str) -> EngineConfig:
    """Starts the engine and returns its configuration.

    Raises:
        SluiceError: as raised by the engine; FAILED_PRECONDITION for every other exception.
    """
    try:
        config = await engine.start(worker_id)
    except SluiceError:
        raise
    except MemoryError as error:
        raise _start_error("there is not enough memory for the model and its cache", "out_of_memory") from error
    except Exception as error:
        log.debug("engine failed to start", exc_info=True)
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        raise _start_error(f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__) from error
    if not config.model:
        raise _start_error("its configuration has no model name")
    return config


def _start_error(why: str, code: str = "") -> SluiceError:
    return SluiceError(ErrorKind.FAILED_PRECONDITION, f"The engine cannot start: {why}.", code=code)


def _with_bootstrap(request: GenerateRequest, config: EngineConfig) -> GenerateRequest:
    """Returns the request with the address of the engine's bootstrap server, unless it names another one."""
    half = request.disaggregation
    if half is None or not config.bootstrap_port or half.bootstrap_port or half.role is not Role.PREFILL:
        return request
    half = replace(half, bootstrap_host=config.bootstrap_host, bootstrap_port=config.bootstrap_port)
    return replace(request, disaggregation=half)


def _with_defaults(request: GenerateRequest, config: EngineConfig) -> GenerateRequest:
    """Resolves an adapter named as the model to its `lora` field, and omits the rank where there is only one."""
    lora = request.model if request.model in config.adapters and not request.lora else request.lora
    rank = request.data_parallel_rank if config.data_parallel_size > 1 else None
    if (lora, rank) == (request.lora, request.data_parallel_rank):
        return request
    return replace(request, lora=lora, data_parallel_rank=rank)
