"""The state of one choice in progress, sufficient to continue it on another worker or postprocess replica."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import NamedTuple, Protocol

from opentelemetry.trace import Span

from services.common.errors import SluiceError, internal
from services.common.observability import telemetry
from services.common.packing import unpack_u32
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.context import RequestContext
from services.gateway.core.receipts import Receipt, receipt_of
from services.gateway.core.request import (
    NULL_SINK,
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

PROMPT_TAIL_TOKENS = 16
"""Length of `TokenizedPrompt.prompt_tail`, from which detokenization continues; as in preprocess."""


class EngineEnd(NamedTuple):
    """How the engine ended a generation; `stop_token_id` is the stop token, if one ended it."""

    reason: FinishReason
    stop_token_id: int | None = None


class WorkerPair(NamedTuple):
    """The decode worker that continues a stream after its prefill worker.

    Attributes:
        worker: the decode worker.
        rank: its data-parallel rank.
        name: request id on both workers.
        resumed: tokens generated before the prefill; both workers receive them with the prompt.
    """

    worker: WorkerLink
    rank: int | None
    name: str
    resumed: int


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
        route: as chosen for its current worker.
        worker: the worker that runs it; None once the engine has finished, and during a migration.
        post: what makes its text; None while it waits for a postprocess replica.
        waiting_since: when it began to wait for a postprocess replica.
        tokens: all tokens generated so far, by all of its workers.
        resumed: how many of the tokens came from earlier workers.
        reservations: what made the reservation; None: the gateway's router.
        booked_from: how many tokens there were when the current reservation was made.
        logprob_positions: number of output tokens received with log-probabilities.
        prompt_positions: number of prompt tokens received with log-probabilities.
        prompt_ids: token ids of a prompt tokenized by the worker, empty until received; None: they are in `prompt`.
        pair: the decode worker, while a pair runs it.
        handed_over: whether the decode worker of the pair has taken over.
        text_sent: code points of content passed to the sink; separate from `sent` for speed.
        sent: other output passed to the sink.
        end: how the engine ended it; None while the engine runs.
        migrations: number of migrations.
        losses: workers that failed it, by id, in order.
        replays: how often another postprocess replica took it over after a loss.
        migration_task: the migration in progress.
        cached_tokens: cached prompt tokens on its first worker.
        prefilled: whether prefill has completed with the current reservation.
        attempt_cached: cached prompt tokens on the current worker; None until it has reported them.
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
    worker: WorkerLink | None = None
    route: Route | None = None
    reservation_id: str = ""
    reservations: Reservations | None = None
    post: TextLink | None = None
    waiting_since: float = 0.0
    tokens: array[int] = field(default_factory=lambda: array("I"))
    resumed: int = 0
    booked_from: int = 0
    logprob_positions: int = 0
    prompt_positions: int = 0
    prompt_ids: array[int] | None = field(init=False)
    pair: WorkerPair | None = None
    handed_over: bool = False
    text_sent: int = 0
    sent: Sent = field(default_factory=Sent)
    end: EngineEnd | None = None
    migrations: int = 0
    losses: dict[str, Loss] = field(default_factory=dict)
    replays: int = 0
    migration_task: asyncio.Task[None] | None = None
    cached_tokens: int = 0
    prefilled: bool = False
    attempt_cached: int | None = None
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

    def detach_sink(self) -> Sink:
        """Detaches and returns the sink, which breaks the reference cycle between sink and stream."""
        sink, self.sink = self.sink, NULL_SINK
        return sink

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
        if self.route is None or not self.context.hints.receipt:
            return None
        return receipt_of(self.route, self.prompt_tokens, self.attempt_cached)

    def attach(self, worker: WorkerLink, route: Route) -> None:
        """Assigns the stream to a worker with a new reservation."""
        self.worker = worker
        self.route = route
        self.reservation_id, self.reservations = route.reservation_id, route.reservations
        self.prefilled, self.attempt_cached = False, None
        self.resumed = self.booked_from = len(self.tokens)
        self.pair = None
        self.handed_over = False
        worker.adopt(self)

    def switch_worker(self, worker: WorkerLink) -> None:
        """Moves the stream to another worker of the same reservation."""
        if self.worker is not None:
            self.worker.release(self)
        self.worker = worker
        self.resumed = len(self.tokens)
        worker.adopt(self)

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
