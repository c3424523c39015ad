"""The contract between a worker and the engine it hosts."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from services.common.errors import ErrorKind, SluiceError, internal
from services.common.tasks import TaskOwner
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

if TYPE_CHECKING:
    from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine serves; constant from `start` on. Zero means unknown, except where a default says otherwise."""

    model: str
    source: str
    processor: str
    fingerprint: str
    context_length: int
    vocab_size: int
    block_size: int
    total_blocks: int
    max_sequences: int
    max_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    capabilities: frozenset[str] = frozenset({"token_ids"})
    accepted: frozenset[str] = frozenset()  # options that are taken and have no effect; not on the card
    adapters: tuple[str, ...] = ()
    data_parallel_size: int = 1
    role: Role = Role.AGGREGATED
    engine: str = ""
    engine_version: str = ""
    prompt_fingerprint: str = ""  # as in `sluice.v1.TokenizerSpec`, where the engine makes prompts itself
    chat_template: str = ""  # Jinja, instead of the one in the files
    tool_parser: str = ""  # what "auto" means for this model; empty: the template tells
    reasoning_parser: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """How one data-parallel rank is doing; units as in `sluice.v1.WorkerLoad`."""

    running_requests: int = 0
    waiting_requests: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    prefill_tokens: int = 0
    step_ms: float = 0.0


@dataclass(slots=True)
class GenerateContext:
    """One request's life outside the engine.

    Attributes:
        trace: W3C headers of its `engine.generate` span, for processes that the engine calls; within the worker that
            span is the current one. While the trace is not recorded: the caller's headers, if any.
        cancelled: the caller has stopped waiting.
    """

    request_id: str
    trace: Mapping[str, str] = field(default_factory=dict)
    cancelled: bool = False


class Sink(ABC):
    """Where an engine puts one request's tokens, synchronously from its step; a sink neither raises nor blocks."""

    __slots__ = ()

    @abstractmethod
    def begin(self, cached_tokens: int, prompt_logprobs: Sequence[PositionLogprobs] = ()) -> None:
        """Once, right before the first push: prompt tokens that came from the prefix cache."""

    @abstractmethod
    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        """The next tokens; `logprobs` is empty or has one entry per token."""

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
        """Once, last, also after an abort (with CANCELLED)."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """Vectors in the order of their inputs, each little-endian float32 back to back."""

    vectors: Sequence[bytes]
    prompt_tokens: int


class LLMEngine(ABC):
    """Computes tokens. A new engine writes `from_args`, `start`, `generate`, `load` and `cleanup`.

    Attributes:
        CAPABILITIES: the most this engine can honour, whatever the settings; `EngineConfig.capabilities` is what it
            honours as started.
        ACCEPTED: what it takes without honouring it, because clients send it whatever the engine; everything that is
            in neither set is refused.
        tasks: owner of the engine's background tasks; one that dies fails the worker.
        on_failure: set by the worker; call it when the engine cannot go on.
        on_phase: set by the worker; call it from the event loop while starting, with what is being done ("loading
            weights") and how far it is (0 to 1, None: unknown).
    """

    CAPABILITIES: ClassVar[frozenset[Capability]] = frozenset({Capability.TOKEN_IDS})
    ACCEPTED: ClassVar[frozenset[Capability]] = frozenset()

    def __init__(self) -> None:
        self.on_failure: Callable[[str, BaseException], None] = lambda name, error: None
        self.on_phase: Callable[[str, float | None], None] = lambda phase, share: None
        self.tasks = TaskOwner(lambda name, error: self.on_failure(name, error))
        self._driven: dict[str, asyncio.Task[None]] = {}

    @classmethod
    @abstractmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        """Makes an engine without starting anything; SluiceError when settings do not fit."""

    @abstractmethod
    async def start(self, worker_id: str) -> EngineConfig:
        """Loads what it takes, off the event loop, and says what is served; SluiceError when that fails."""

    @abstractmethod
    def generate(self, request: GenerateRequest, context: GenerateContext) -> AsyncGenerator[Delta, None]:
        """The deltas of one request, exactly one terminal and last. Closing the iterator cancels the request.

        Raises:
            SluiceError: OVERLOADED when the waiting queue is full, INVALID_ARGUMENT when the request cannot work.
        """

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        """The push form of `generate`, without a task switch per token where an engine overrides it.

        Raises:
            SluiceError: as `generate`; the sink is then never called.
        """
        progress = _Progress(len(request.token_ids), sink)
        task = self.tasks.spawn(self._drive(request, context, progress), f"generate-{request.request_id}")
        self._driven[request.request_id] = task

        def ended(done: asyncio.Task[None]) -> None:
            if self._driven.get(request.request_id) is done:
                del self._driven[request.request_id]
            progress.end(FinishReason.CANCELLED)  # of a task that was cancelled, possibly before its first step

        task.add_done_callback(ended)

    def abort(self, context: GenerateContext) -> None:
        """Ends a submitted request within one engine step; its sink hears CANCELLED. Unknown ones are ignored."""
        context.cancelled = True
        task = self._driven.get(context.request_id)
        if task is not None and not task.cancelling():  # twice would cut off what `generate` does at its end
            task.cancel()

    async def drain(self) -> None:
        """Returns when every request has ended; the caller sets the deadline and sends nothing new."""
        while self._driven:
            await asyncio.wait(list(self._driven.values()))

    @abstractmethod
    async def cleanup(self) -> None:
        """Gives everything back; may be called twice, and on an engine that never started."""

    @abstractmethod
    def load(self) -> Sequence[Load]:
        """Load by data-parallel rank, in well under a millisecond."""

    def kv_event_sources(self) -> Sequence[KvEventSource]:
        """One source per data-parallel rank, the same ones at every call; empty: the engine reports no cache."""
        return ()

    async def clear_cache(self) -> None:
        """Forgets every reusable prefix; SluiceError(FAILED_PRECONDITION) when the engine cannot."""
        raise SluiceError(ErrorKind.FAILED_PRECONDITION, "This engine cannot clear its prefix cache.")

    async def embed(self, inputs: Sequence[array[int]], dimensions: int, lora: str = "") -> Embedded:
        """Vectors of token sequences, cut to `dimensions` (0: the model's own).

        Raises:
            SluiceError: FAILED_PRECONDITION when the engine computes none, INVALID_ARGUMENT for wrong inputs.
        """
        raise _unsupported("does not compute embeddings", "model")

    async def control(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        """Operates the engine: sleep, wake, load_lora, unload_lora, start_profile, stop_profile, inject_fault.

        The worker stops taking requests and lets those under way end before `sleep`; it takes "name" of an adapter out
        of the card or adds it after the engine has answered.

        Raises:
            SluiceError: FAILED_PRECONDITION for an action the engine does not have, INVALID_ARGUMENT for its arguments.
        """
        raise _unsupported(f"does not have the action {action}", "action")

    def metrics_text(self) -> str:
        """The engine's own metrics in Prometheus' text format, in well under a millisecond; empty: it has none.

        Called from the thread that answers the scrape; names that start with `sluice_` are the worker's and dropped.
        """
        return ""

    async def _drive(self, request: GenerateRequest, context: GenerateContext, progress: _Progress) -> None:
        """Pushes what `generate` yields, and a terminal of its own when that yields none."""
        try:
            async with aclosing(self.generate(request, context)) as deltas:
                async for delta in deltas:
                    progress.forward(delta)
                    if delta.finish_reason is not None:
                        return
            raise SluiceError(ErrorKind.STREAM_INCOMPLETE, "The engine ended the generation without a finish reason.")
        except SluiceError as error:
            progress.end(FinishReason.ERROR, error)
        except Exception:
            log.exception("engine failed", extra={"request": request.request_id})
            progress.end(FinishReason.ERROR, internal("The engine failed on this request."))


def _unsupported(what: str, param: str) -> SluiceError:
    return SluiceError(ErrorKind.FAILED_PRECONDITION, f"This engine {what}.", param=param, code="unsupported_by_engine")


class _Progress:
    """Carries a driven request's deltas to its sink, and knows the usage of an end the engine did not write itself."""

    def __init__(self, prompt_tokens: int, sink: Sink) -> None:
        self._sink = sink
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self._cached: int | None = None
        self._ended = False

    def end(self, reason: FinishReason, error: SluiceError | None = None) -> None:
        """Ends the request unless it has ended."""
        if not self._ended:
            self._ended = True
            self._sink.finish(reason, self._usage(), error=error)

    def forward(self, delta: Delta) -> None:
        """Pushes one delta."""
        if self._cached is None:
            self._cached = delta.cached_tokens or 0
            self._sink.begin(self._cached, delta.prompt_logprobs)
        if delta.token_ids:
            self._tokens += len(delta.token_ids)
            self._sink.push(delta.token_ids, delta.logprobs)
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
        return Usage(self._prompt_tokens, self._tokens, self._cached or 0)
