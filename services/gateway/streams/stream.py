"""The state of one choice in progress, sufficient to continue it on another worker or postprocess replica."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import NamedTuple, Protocol

from opentelemetry.trace import Span

from services.common.base.errors import SluiceError, internal
from services.common.base.packing import unpack_u32
from services.common.observability import telemetry
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.core.context import RequestContext
from services.gateway.core.receipts import Receipt, receipt_of
from services.gateway.core.request import (
    DisaggregationPart,
    FinishReason,
    GenerationRequest,
    PositionLogprobs,
    Reservations,
    Route,
    Sink,
    TokenizedPrompt,
)
from services.gateway.core.stream_view import Sent
from services.gateway.streams.running_memory import RunningShare
from services.gateway.streams.states import StreamState, TextState, checked

PROMPT_TAIL_TOKENS = 16
"""Length of `TokenizedPrompt.prompt_tail`, from which detokenization continues; as in preprocess."""


class EngineEnd(NamedTuple):
    """How the engine ended a generation; `stop_token_id` is the stop token, if one ended it."""

    reason: FinishReason
    stop_token_id: int | None = None


class WorkerStart(NamedTuple):
    """How a worker starts to run a stream.

    Attributes:
        rank: data-parallel rank; None: the worker chooses.
        name: request id on the worker; both workers of a pair have the same.
        resumed: tokens generated before, which the worker receives with the prompt.
        part: its role in a pair; None: it runs the stream alone.
    """

    worker: WorkerLink
    rank: int | None
    name: str
    resumed: int
    part: DisaggregationPart | None = None


@dataclass(slots=True)
class Attempt:
    """The run of a stream on the workers of one reservation; after a migration there is another one.

    Attributes:
        route: as its workers were chosen.
        reservations: receives the outcomes of the reservation.
        first_token: how many tokens there were before.
        decode: the decode worker of a pair; None: one worker runs the stream.
        reserved: whether the reservation must still be released.
        prefilled: whether a worker has reported the completion of prefill.
        cached_tokens: cached tokens of prompt and earlier output; None until a worker has reported them.
    """

    route: Route
    reservations: Reservations
    first_token: int
    decode: WorkerStart | None = None
    reserved: bool = True
    prefilled: bool = False
    cached_tokens: int | None = None


class Loss(NamedTuple):
    """A worker that failed a stream, its number of sessions at that time, and the time."""

    worker: WorkerLink
    sessions: int
    at: float


class RecoveryPolicy(Protocol):
    """Decides how a stream continues when its worker cannot finish it."""

    def on_handoff(self, stream: GenerationStream, handoff: bytes) -> None:
        """Continues a stream on the decode worker of its pair, with the handoff of the prefill worker."""

    def on_interrupted(self, stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> SluiceError | None:
        """Handles the failure of a stream's worker.

        Returns:
            None if the stream continues, at once or later, else the error to end it with.
        """


class TextLink(Protocol):
    """Turns the tokens of streams into text: the link to a postprocess replica, or a custom stage."""

    leaving: bool

    def adopt(self, stream: GenerationStream) -> None: ...

    def release(self, stream: GenerationStream) -> None: ...

    def open(self, stream: GenerationStream) -> None: ...

    def feed(self, slots: bytes, counts: bytes, token_ids: bytes) -> None: ...

    def end(self, slot: int, reason: FinishReason, stop_token_id: int | None) -> None: ...

    def close_stream(self, slot: int) -> None: ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class GenerationStream:
    """The state of one choice of a request.

    Attributes:
        slot: its number on its links.
        index: the number of the choice.
        context: the context of its request.
        recovery: continues it when its worker fails.
        custom_text: the custom stage that makes its text; None: the engine or a postprocess replica does.
        state: the state of its engine; see `states`.
        text_state: the state of its text.
        worker: the worker that runs it, while it is RUNNING, PREFILLING or DECODING.
        attempt: its run on that worker, or the last one; None until it has been placed.
        post: what makes its text while that is OPEN.
        waiting_since: when it began to wait for a postprocess replica.
        tokens: all tokens generated so far, by all of its workers.
        resumed: how many of the tokens came from earlier workers.
        logprob_positions: number of output tokens received with log-probabilities.
        prompt_positions: number of prompt tokens received with log-probabilities.
        prompt_ids: token ids of a prompt tokenized by the worker, empty until received; None: they are in `prompt`.
        text_sent: code points of content passed to the sink; separate from `sent` for speed.
        sent: other output passed to the sink.
        end: how the engine ended it, once it is ENGINE_DONE.
        migrations: number of migrations.
        losses: workers that failed it, by id, in order.
        replays: how often another postprocess replica took it over after a loss.
        migration_task: the migration in progress.
        cached_tokens: cached prompt tokens on its first worker.
        computed: whether prefill has completed on any worker.
        active: whether text has arrived since the last sweep.
        tokens_at_last_sweep: number of tokens at the last sweep.
        memory: what its request holds; released at its end.
    """

    slot: int
    request: GenerationRequest
    index: int
    prompt: TokenizedPrompt
    max_tokens: int
    sink: Sink
    context: RequestContext
    recovery: RecoveryPolicy
    custom_text: TextLink | None = None
    state: StreamState = StreamState.STARTING
    text_state: TextState = TextState.DEFERRED
    worker: WorkerLink | None = None
    attempt: Attempt | None = None
    post: TextLink | None = None
    waiting_since: float = 0.0
    tokens: array[int] = field(default_factory=lambda: array("I"))
    resumed: int = 0
    logprob_positions: int = 0
    prompt_positions: int = 0
    prompt_ids: array[int] | None = field(init=False)
    text_sent: int = 0
    sent: Sent = field(default_factory=Sent)
    end: EngineEnd | None = None
    migrations: int = 0
    losses: dict[str, Loss] = field(default_factory=dict)
    replays: int = 0
    migration_task: asyncio.Task[None] | None = None
    cached_tokens: int = 0
    computed: bool = False
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    degraded: tuple[str, ...] = ()
    active: bool = True
    tokens_at_last_sweep: int = 0
    started_at: float = field(default_factory=perf_counter)
    first_text_at: float = 0.0
    expiry: asyncio.TimerHandle | None = None
    memory: RunningShare | None = None
    span: Span | None = None
    worker_span: Span | None = None

    def __post_init__(self) -> None:
        self.prompt_ids = None if self.prompt.raw is None else array("I")

    @property
    def model(self) -> str:
        """Served name of the model."""
        return self.request.model

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the client's prompt."""
        return self.prompt.length

    @property
    def request_id(self) -> str:
        """Id of this choice, independent of its worker."""
        return f"{self.request.request_id}-{self.index}"

    @property
    def seed(self) -> int | None:
        """Seed of this choice: the request's seed plus the index, wrapped to a signed 64-bit integer."""
        seed = self.request.sampling.seed
        return None if seed is None else (seed + self.index + 2**63) % 2**64 - 2**63

    @property
    def current_span(self) -> Span | None:
        """Parent span for the services that currently process the stream."""
        return self.worker_span or self.span

    def end_spans(self, error: SluiceError | None) -> None:
        """Ends the spans, with an error if there is one."""
        for span in (self.worker_span, self.span):
            if span is None:
                continue
            span.set_attribute("output_tokens", self.completion_tokens)
            span.set_attribute("migrations", self.migrations)
            if error is not None:
                telemetry.fail_span(span, error.message)
            span.end()

    @property
    def receipt(self) -> Receipt | None:
        """What was predicted, possible and delivered for its route; None unless the request asks for it."""
        if self.attempt is None or not self.context.hints.receipt:
            return None
        return receipt_of(self.attempt.route, self.prompt_tokens, self.attempt.cached_tokens)

    def assign(self, worker: WorkerLink, state: StreamState) -> None:
        """Gives the stream to a worker of its current attempt, in place of the previous one."""
        self.state = checked(self.state, state)
        if self.worker is not None:
            self.worker.release(self)
        self.worker = worker
        self.resumed = len(self.tokens)
        worker.adopt(self)

    def leave_worker(self, state: StreamState) -> None:
        """Drops anything that its worker may still send, and moves to a state without a worker."""
        self.state = checked(self.state, state)
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.release(self)

    def note_cached(self, cached_tokens: int, first: bool) -> None:
        """Records the number of cached tokens, which an engine reports with its first tokens or only at the end.

        Args:
            first: whether it comes from the stream's first worker.
        """
        assert self.attempt is not None
        self.attempt.cached_tokens = min(cached_tokens, self.prompt_tokens + self.resumed)
        if first:
            self.cached_tokens = min(cached_tokens, self.prompt_tokens)

    def set_prompt_ids(self, token_ids: bytes) -> None:
        """Sets the token ids, packed u32, of a prompt that the worker tokenized."""
        prompt = self.prompt
        self.prompt = replace(prompt, token_ids=token_ids, prompt_tail=token_ids[-4 * PROMPT_TAIL_TOKENS :], raw=None)
        if self.prompt_ids is not None:
            self.prompt_ids.extend(unpack_u32(token_ids))
        if prompt.context_length:
            self.max_tokens = min(self.max_tokens, prompt.context_length - self.prompt.length)

    def take_logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """Counts log-probabilities of output tokens; raises SluiceError if they were not requested."""
        self.logprob_positions += len(positions)
        if self.request.logprobs is None or self.logprob_positions > self.max_tokens:
            raise internal("The worker sent log-probabilities that were not requested.")
        _check_alternatives(positions, self.request.logprobs)

    def take_prompt_logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """Counts log-probabilities of the prompt; raises SluiceError if they were not requested."""
        self.prompt_positions += len(positions)
        if self.request.prompt_logprobs is None or self.prompt_positions > self.prompt_tokens:
            raise internal("The worker sent log-probabilities of the prompt that were not requested.")
        _check_alternatives(positions, self.request.prompt_logprobs)

    def is_requested_stop(self, token_id: int) -> bool:
        """Returns whether the client, not the model, defined this id as a stop token."""
        stop = self.request.stop
        return token_id in stop.token_ids and (stop.ignore_eos or token_id not in unpack_u32(self.prompt.eos_token_ids))

    def known_end(self) -> EngineEnd | None:
        """Returns how the tokens so far end the generation, or None if they do not."""
        stop, prompt, count = self.request.stop, self.prompt, len(self.tokens)
        if not count:
            return None
        eos = unpack_u32(prompt.eos_token_ids)
        if stop.ignore_eos:
            stop_ids = set(stop.token_ids).difference(eos)
        else:
            stop_ids = {*stop.token_ids, *unpack_u32(prompt.stop_token_ids), *eos}
        if count > stop.min_tokens and self.tokens[-1] in stop_ids:
            return EngineEnd(FinishReason.STOP, self.tokens[-1])
        return EngineEnd(FinishReason.LENGTH) if count >= self.max_tokens else None


def _check_alternatives(positions: Sequence[PositionLogprobs], most: int) -> None:
    """Raises SluiceError if a position has more alternatives than requested; engines may add the chosen token."""
    if any(len(position.top) > most + 1 for position in positions):
        raise internal("The worker sent more alternatives for a token than were requested.")
