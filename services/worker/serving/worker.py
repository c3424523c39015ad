"""The worker: everything engines have in common, from the first request to the shutdown in order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from services.common.budgets import Budget
from services.common.errors import ErrorKind, SluiceError, internal, invalid
from services.common.observability import telemetry
from services.worker.contract.engine import EngineConfig, GenerateContext, LLMEngine, Load
from services.worker.contract.generation import FinishReason, GenerateRequest, Usage
from services.worker.contract.handoff import opened, seal
from services.worker.generation.response_sink import ResponseSink, SinkParams
from services.worker.generation.tracing import open_span
from services.worker.generation.validation import validate, validate_grammar_size
from services.worker.local_processing.processing import Processing
from services.worker.metrics import WorkerMetrics
from services.worker.processing_options import ProcessingOptions
from services.worker.serving.admission_gate import AdmissionGate
from services.worker.serving.engine_start import started
from services.worker.serving.status import WorkerStatus

log = logging.getLogger(__name__)

CLEANUP_S = 5.0


class Worker:
    """Owns one engine and every live request on it.

    Args:
        engine: made, not started.
        worker_id: unique name.
        on_failure: called when the engine cannot go on.
        max_live: requests alive at once; 0: no limit.
        strict: an engine that breaks its contract has an exception raised into it.
        processing: prompts and texts that are made beside the engine; by default none.
        grammar: characters of a constraint on an answer; by default any number.

    Attributes:
        epoch: raised at every start; microseconds, because a store may keep numbers as doubles.
        loaded_unix_s: when the engine was ready, Unix seconds.
        draining: leaves discovery, and from `refuse_new` on takes no requests.
        phases: what keeps it from serving.
        gate: whether requests are welcome.
        on_card: called when the card has changed.
        last_finished_s: when a generation was last finished without an error, monotonic seconds.
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
    ) -> None:
        self.engine = engine
        self.processing = Processing(processing or ProcessingOptions("none"), self._background_failed)
        self.worker_id = worker_id
        self.epoch = time.time_ns() // 1000
        self.loaded_unix_s = 0
        self.draining = False
        self.phases = WorkerStatus()
        self.gate = AdmissionGate(self.phases, max_live)
        self.on_card: Callable[[], None] = lambda: None
        self.last_finished_s = time.monotonic()
        self._delivered_before = 0  # to requests that have ended
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
        """What the engine serves; SluiceError(UNAVAILABLE) until it has started."""
        if self._config is None:
            raise self.gate.refusal or SluiceError(ErrorKind.UNAVAILABLE, "The worker is still starting.")
        return self._config

    @property
    def started(self) -> bool:
        """The engine is loaded."""
        return self._config is not None

    @property
    def live_requests(self) -> int:
        """Requests that have not heard their terminal delta."""
        return len(self._live)

    @property
    def delivered_tokens(self) -> int:
        """Tokens that callers got since the start; the canary's own are not among them."""
        return self._delivered_before + sum(delivery.delivered for delivery in self._live.values())

    def load(self) -> Sequence[Load]:
        """Load by data-parallel rank."""
        return self.engine.load() if self._config is not None else [Load()]

    async def start(self, chat_template: str = "", tool_parser: str = "", reasoning_parser: str = "") -> EngineConfig:
        """Starts the engine and takes requests from then on; what is given goes onto the card.

        Raises:
            SluiceError: one sentence about why it cannot.
        """
        self.phases.enter("starting the engine")
        config = await started(self.engine, self.worker_id)
        self.phases.enter("loading the tokenizer")
        self._config = await self.processing.start(
            replace(
                config,
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

    def submit(self, request: GenerateRequest, delivery: ResponseSink, trace: Mapping[str, str] | None = None) -> None:
        """Checks a request and gives it to the engine; from then on the delivery hears exactly one terminal delta.

        Raises:
            SluiceError: the request was refused; the delivery hears nothing.
        """
        try:
            self.gate.check()
            if request.guided is not None and self._grammar is not None:
                validate_grammar_size(request.guided, self._grammar)
            validate(request, self.config)
            if request.request_id in self._live:
                raise invalid(
                    f"A request with id {request.request_id!r} is already alive.",
                    param="request_id",
                    code="duplicate_request_id",
                )
            request = resolved(request, self.config)
            if self.processing.makes_prompt_of(request):
                self._prepare(request, delivery, trace or {})
            else:
                self._give_to_engine(request, delivery, trace or {})
        except SluiceError as error:
            if self._live.get(request.request_id) is delivery:
                delivery.refuse(error)
                self._forget(request.request_id)
            self.metrics.record_refusal(error.kind.name.lower())
            raise

    def change_card(self, config: EngineConfig) -> None:
        """What is served has changed; the same epoch goes on."""
        self._config = config
        self.on_card()

    def _prepare(self, request: GenerateRequest, delivery: ResponseSink, trace: Mapping[str, str]) -> None:
        """The request is alive while its prompt is made, and the engine hears of it after that."""
        self._live[request.request_id] = delivery
        self.gate.count(len(self._live))
        delivery.accept(GenerateContext(request.request_id, trace), 0, SinkParams(self._ended, self._broken), None)

        def go_on(prepared: GenerateRequest) -> None:
            delivery.made_prompt = prepared.token_ids
            self._give_to_engine(prepared, delivery, trace)

        self.processing.preparing.start(request, go_on, delivery.fail)

    def _give_to_engine(self, request: GenerateRequest, delivery: ResponseSink, trace: Mapping[str, str]) -> None:
        request, handed_over_by = opened(request)
        span = open_span(request, self.config.role, trace, handed_over_by)
        context = GenerateContext(request.request_id, trace if span is None else span.carrier)
        terms = SinkParams(
            self._ended,
            self._broken,
            lambda payload, traceparent: seal(request, self.worker_id, self.epoch, traceparent, payload),
            self.config.vocab_size,
            self._strict,
        )
        self._live[request.request_id] = delivery
        self.gate.count(len(self._live))
        delivery.accept(context, len(request.token_ids), terms, span)
        try:
            sink = self.processing.sink(request, delivery, terms, lambda: self.engine.abort(context))
            # Once a request: the task that runs the engine's `generate` is created in here and keeps the span.
            with telemetry.activate(None) if span is None else span.active():
                self.engine.submit(request, context, sink)
        except SluiceError:
            raise
        except Exception as error:
            log.exception("the engine failed to take a request", extra={"request": request.request_id})
            raise internal("The engine failed on this request.") from error

    def cancel(self, delivery: ResponseSink) -> None:
        """The caller lost interest: the engine stops within a step and the delivery hears CANCELLED."""
        if delivery.ended:
            return
        if self.processing.preparing.give_up(delivery.context.request_id):
            delivery.withdraw()
        else:
            self.engine.abort(delivery.context)

    def fail(self, delivery: ResponseSink, error: SluiceError) -> None:
        """Ends a request with an error of the worker's own."""
        delivery.fail(error)
        self.engine.abort(delivery.context)

    def _total_blocks(self) -> list[int]:
        config = self._config
        return [] if config is None else [config.total_blocks] * config.data_parallel_size

    def fail_all(self, error: SluiceError) -> None:
        """Ends every live request."""
        for delivery in tuple(self._live.values()):
            self.fail(delivery, error)

    def abort(self, request_id: str) -> bool:
        """Cancels by request id; False when no such request is alive."""
        delivery = self._live.get(request_id)
        if delivery is None:
            return False
        self.cancel(delivery)
        return True

    async def wait_idle(self) -> None:
        """Returns when no request is alive; the caller sets the deadline."""
        await self.gate.idle.wait()

    def refuse_new(self) -> None:
        """From now on requests are refused as ENGINE_SHUTDOWN, which callers retry elsewhere."""
        self.gate.close(_shutting_down())

    async def drain(self, timeout_s: float) -> None:
        """Waits for live requests; those that outlast the timeout end as ENGINE_SHUTDOWN."""
        self.refuse_new()
        try:
            async with asyncio.timeout(timeout_s):
                await self.gate.idle.wait()
                await self.engine.drain()
        except TimeoutError:
            log.warning("requests outlasted the drain", extra={"requests": len(self._live)})
            self.fail_all(_shutting_down())

    async def cleanup(self) -> None:
        """Gives the engine's resources back, within a deadline."""
        try:
            async with asyncio.timeout(CLEANUP_S):
                await self.engine.cleanup()
        except TimeoutError:
            log.warning("the engine's cleanup did not end in time", extra={"seconds": CLEANUP_S})
        await self.processing.close()

    def _engine_failed(self, name: str, error: BaseException) -> None:
        failed = SluiceError(ErrorKind.ENGINE_SHUTDOWN, "The engine of this worker has failed.")
        self.gate.close(failed)
        self.fail_all(failed)
        if self._report_failure is not None:
            self._report_failure(name, error)

    def _background_failed(self, name: str, error: BaseException) -> None:
        if self._report_failure is not None:
            self._report_failure(name, error)

    def _broken(self, delivery: ResponseSink, rule: str) -> None:
        self.metrics.record_broken_contract(rule)
        if not delivery.ended:
            self.fail(delivery, internal("The engine broke its contract on this request; the worker's log says how."))

    def _ended(self, delivery: ResponseSink, reason: FinishReason, usage: Usage) -> None:
        self._forget(delivery.context.request_id)
        now, first = time.monotonic(), delivery.first_token_s
        self._delivered_before += delivery.delivered
        if not delivery.overruled and reason not in (FinishReason.ERROR, FinishReason.CANCELLED):
            self.last_finished_s = now
        self.metrics.record(
            reason, usage, None if first is None else first - delivery.started_s, now - delivery.started_s
        )

    def _forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self.processing.forget(request_id)
        self.gate.count(len(self._live))


def _shutting_down() -> SluiceError:
    return SluiceError(ErrorKind.ENGINE_SHUTDOWN, "The worker is shutting down; another one can serve the request.")


def resolved(request: GenerateRequest, config: EngineConfig) -> GenerateRequest:
    """A model name that is an adapter's stands for the base model with that adapter; the only rank needs no name."""
    lora = request.model if request.model in config.adapters and not request.lora else request.lora
    rank = request.data_parallel_rank if config.data_parallel_size > 1 else None
    if (lora, rank) == (request.lora, request.data_parallel_rank):
        return request
    return replace(request, lora=lora, data_parallel_rank=rank)
