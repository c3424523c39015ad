"""Defines `LLMEngine`, the contract between a worker and the engine it hosts."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import ClassVar, Self

from services.common.base.errors import ErrorKind, SluiceError, internal
from services.common.base.tasks import TaskOwner
from services.worker.contract.cache_events import KvEventSource
from services.worker.contract.capabilities import Capability
from services.worker.contract.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    Role,
    Usage,
)
from services.worker.contract.text_delta import TextUpdate
from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Describes a started engine; constant after `start`. Zero and empty mean unknown, or none."""

    model: str
    source: str = ""  # of the tokenizer's files, as in `--model`; with fingerprint, so that other services fetch them
    processor: str = ""
    fingerprint: str = ""
    context_length: int = 0
    vocab_size: int = 0
    block_size: int = 0
    total_blocks: int = 0
    max_sequences: int = 0
    max_batched_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    capabilities: frozenset[str] = frozenset({"token_ids"})
    accepted: frozenset[str] = frozenset()  # options accepted without effect; not listed on the model card
    adapters: tuple[str, ...] = ()
    data_parallel_size: int = 1
    role: Role = Role.AGGREGATED
    engine: str = ""  # empty: the name of the class
    engine_version: str = ""
    prompt_fingerprint: str = ""  # as in `sluice.v1.TokenizerSpec`, for engines that build prompts themselves
    media_fingerprint: str = ""  # the same
    chat_template: str = ""  # Jinja template that replaces the model's own
    tool_parser: str = ""  # resolves "auto" for this model; empty: detected from the template
    reasoning_parser: str = ""
    labels: tuple[str, ...] = ()  # classes of a model that classifies
    named_by_server: bool = False  # a server that the operator does not run chose the model's name
    http_address: str = ""  # host:port of the engine's own HTTP server; --http-address overrides it
    bootstrap_host: str = ""  # of a prefill worker's bootstrap server, in the requests of a pair that name none
    bootstrap_port: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one data-parallel rank; units as in `sluice.v1.WorkerLoad`."""

    running_requests: int = 0
    waiting_requests: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    prefill_tokens: int = 0
    step_ms: float = 0.0


@dataclass(slots=True)
class GenerateContext:
    """State of one request outside the engine.

    Attributes:
        trace: W3C trace headers of the `engine.generate` span, for processes that the engine calls; in the worker
            process that span is already current. If the trace is not sampled, the caller's headers, if any.
        cancelled: Whether the caller has disconnected or cancelled.
    """

    request_id: str
    trace: Mapping[str, str] = field(default_factory=dict)
    cancelled: bool = False


class Sink(ABC):
    """Receives one request's tokens, called synchronously from the engine's step; must neither raise nor block."""

    __slots__ = ()

    @abstractmethod
    def begin(self, cached_tokens: int | None, prompt_logprobs: Sequence[PositionLogprobs] = ()) -> None:
        """Starts the output, before the first push.

        Args:
            cached_tokens: prompt tokens found in the prefix cache; None: not known before the usage has them.
        """

    @abstractmethod
    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        """Appends tokens; `logprobs` is empty or has one entry per token."""

    def push_text(self, text: TextUpdate) -> None:
        """Appends text, from an engine that has the capability text_out itself; never its `finish`."""
        raise TypeError(f"{type(self).__name__} takes tokens only.")

    @abstractmethod
    def finish(
        self,
        reason: FinishReason,
        usage: Usage,
        *,
        stop_token_id: int | None = None,
        error: SluiceError | None = None,
        handoff: bytes = b"",
    ) -> None:
        """Ends the output; called exactly once and last, with CANCELLED after an abort."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """Embedding vectors or class probabilities in input order, each packed as little-endian float32."""

    vectors: Sequence[bytes]
    prompt_tokens: int


class LLMEngine(ABC):
    """Base class of engines. A subclass implements `from_args`, `start`, `generate`, `load` and `cleanup`.

    Attributes:
        CAPABILITIES: Every capability the engine supports under some settings; `EngineConfig.capabilities` lists those
            of the started engine.
        ACCEPTED: Options accepted without effect because clients send them to any engine; an option in neither set
            is rejected.
        tasks: Owns the engine's background tasks; a task that fails, fails the worker.
        on_failure: Set by the worker; call it when the engine cannot continue.
        on_phase: Set by the worker; call it from the event loop during `start` with the current step ("loading
            weights") and its progress from 0 to 1 (None: unknown).
    """

    CAPABILITIES: ClassVar[frozenset[Capability]] = frozenset({Capability.TOKEN_IDS})
    ACCEPTED: ClassVar[frozenset[Capability]] = frozenset()

    def __init__(self) -> None:
        self.on_failure: Callable[[str, BaseException], None] = lambda name, error: None
        self.on_phase: Callable[[str, float | None], None] = lambda phase, share: None
        self.tasks = TaskOwner(lambda name, error: self.on_failure(name, error))
        self._generate_tasks: dict[str, asyncio.Task[None]] = {}

    @classmethod
    @abstractmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        """Creates an engine without starting it; raises SluiceError for invalid settings."""

    @abstractmethod
    async def start(self, worker_id: str) -> EngineConfig:
        """Loads the model off the event loop and returns the engine's description; raises SluiceError on failure."""

    @abstractmethod
    def generate(self, request: GenerateRequest, context: GenerateContext) -> AsyncGenerator[Delta, None]:
        """Yields the deltas of one request; only the last one is terminal. Closing the iterator cancels the request.

        Raises:
            SluiceError: OVERLOADED when the waiting queue is full, INVALID_ARGUMENT when the request is invalid.
        """

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        """Starts a request that pushes its output to a sink; override it to avoid a task switch per token.

        Raises:
            SluiceError: As `generate`; the sink is then never called.
        """
        output = _SinkForwarder(len(request.token_ids), sink)
        task = self.tasks.spawn(self._run_generate(request, context, output), f"generate-{request.request_id}")
        self._generate_tasks[request.request_id] = task

        def on_done(done: asyncio.Task[None]) -> None:
            if self._generate_tasks.get(request.request_id) is done:
                del self._generate_tasks[request.request_id]
            output.end(FinishReason.CANCELLED)  # applies to a cancelled task, possibly before its first step

        task.add_done_callback(on_done)

    def abort(self, context: GenerateContext) -> None:
        """Cancels a submitted request within one engine step; its sink receives CANCELLED. Ignores unknown requests."""
        context.cancelled = True
        task = self._generate_tasks.get(context.request_id)
        if task is not None and not task.cancelling():  # a second cancel would interrupt the cleanup of `generate`
            task.cancel()

    async def drain(self) -> None:
        """Waits until every request has ended; the caller sets the deadline and submits no new requests."""
        while self._generate_tasks:
            await asyncio.wait(list(self._generate_tasks.values()))

    @abstractmethod
    async def cleanup(self) -> None:
        """Releases all resources; may be called twice, and on an engine that never started."""

    @abstractmethod
    def load(self) -> Sequence[Load]:
        """Returns the load of each data-parallel rank; must return within a fraction of a millisecond."""

    def kv_event_sources(self) -> Sequence[KvEventSource]:
        """Returns one source per data-parallel rank, the same at every call; empty if the engine has no KV events."""
        return ()

    async def clear_cache(self) -> None:
        """Clears the prefix cache; raises SluiceError(FAILED_PRECONDITION) when the engine cannot."""
        raise SluiceError(ErrorKind.FAILED_PRECONDITION, "This engine does not support clearing its prefix cache.")

    async def embed(self, inputs: Sequence[array[int]], dimensions: int, lora: str = "") -> Embedded:
        """Returns embeddings of token sequences, truncated to `dimensions` (0: the model's own size).

        Raises:
            SluiceError: FAILED_PRECONDITION when the engine does not compute embeddings, INVALID_ARGUMENT for invalid
                inputs.
        """
        raise _unsupported("does not compute embeddings", "model")

    async def classify(self, inputs: Sequence[array[int]], second_text_at: Sequence[int], lora: str = "") -> Embedded:
        """Returns the probability of each label for token sequences.

        Args:
            second_text_at: per input, index of the first token of the second of two texts; 0 for one text.

        Raises:
            SluiceError: FAILED_PRECONDITION when the engine does not classify, INVALID_ARGUMENT for invalid inputs.
        """
        raise _unsupported("does not classify", "model")

    async def control(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        """Runs an action: sleep, wake, load_lora, unload_lora, start_profile, stop_profile or inject_fault.

        Before `sleep`, the worker stops accepting requests and waits for those in flight. After `load_lora` and
        `unload_lora` succeed, it updates the adapters on the model card by the argument "name".

        Raises:
            SluiceError: FAILED_PRECONDITION for an unsupported action, INVALID_ARGUMENT for invalid arguments.
        """
        raise _unsupported(f"does not support the action {action}", "action")

    def metrics_text(self) -> str:
        """Returns the engine's metrics in the Prometheus text format, or an empty string; must be fast.

        Called from the thread that serves the scrape. Metrics whose names start with `sluice_` are dropped.
        """
        return ""

    async def _run_generate(self, request: GenerateRequest, context: GenerateContext, output: _SinkForwarder) -> None:
        """Forwards the deltas of `generate`, and an error if it ends without a terminal delta."""
        try:
            async with aclosing(self.generate(request, context)) as deltas:
                async for delta in deltas:
                    output.forward(delta)
                    if delta.finish_reason is not None:
                        return
            raise SluiceError(ErrorKind.STREAM_INCOMPLETE, "The engine ended the generation without a finish reason.")
        except SluiceError as error:
            output.end(FinishReason.ERROR, error)
        except Exception:
            log.exception("engine failed", extra={"request": request.request_id})
            output.end(FinishReason.ERROR, internal("The engine failed on this request."))


def _unsupported(what: str, param: str) -> SluiceError:
    return SluiceError(ErrorKind.FAILED_PRECONDITION, f"This engine {what}.", param=param, code="unsupported_by_engine")


class _SinkForwarder:
    """Forwards a request's deltas to its sink, and counts usage for terminals that carry none."""

    def __init__(self, prompt_tokens: int, sink: Sink) -> None:
        self._sink = sink
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self._cached: int | None = None
        self._begun = False
        self._ended = False

    def end(self, reason: FinishReason, error: SluiceError | None = None) -> None:
        """Finishes the sink unless it has finished."""
        if not self._ended:
            self._ended = True
            self._sink.finish(reason, self._usage(), error=error)

    def forward(self, delta: Delta) -> None:
        """Forwards one delta."""
        if not self._begun:
            self._begun = True
            self._cached = None if delta.cached_later else delta.cached_tokens or 0
            self._sink.begin(self._cached, delta.prompt_logprobs)
        if delta.token_ids:
            self._tokens += len(delta.token_ids)
            self._sink.push(delta.token_ids, delta.logprobs)
        if delta.text is not None:
            self._sink.push_text(delta.text)
        if delta.finish_reason is not None:
            self._ended = True
            self._sink.finish(
                delta.finish_reason,
                delta.usage or self._usage(),
                stop_token_id=delta.stop_token_id,
                error=delta.error,
                handoff=delta.handoff,
            )

    def _usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._tokens, self._cached if self._begun else 0)
