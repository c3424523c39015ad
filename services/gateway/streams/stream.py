"""The state of one choice in progress, sufficient to continue it on another worker or postprocess replica."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from opentelemetry.trace import Span

from services.common.errors import SluiceError, internal
from services.common.observability import telemetry
from services.common.packing import unpack_u32
from services.gateway.clients.postprocess_link import Sent
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.context import RequestContext
from services.gateway.core.request import (
    NULL_SINK,
    FinishReason,
    GenerationRequest,
    PositionLogprobs,
    Route,
    Sink,
    TokenizedPrompt,
)
from services.gateway.streams.interfaces import RecoveryPolicy, TextLink

PROMPT_TAIL_TOKENS = 16
"""Length of `TokenizedPrompt.prompt_tail`, from which detokenization continues; as in preprocess."""


class EngineEnd(NamedTuple):
    """How the engine ended a generation; `stop_token_id` is the stop token, if one ended it."""

    reason: FinishReason
    stop_token_id: int | None = None


class Pair(NamedTuple):
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


class GenerationStream:
    """The state of one choice of a request.

    Attributes:
        context: the context of its request.
        recovery: continues it when its worker fails.
        custom_text: the custom stage that makes its text; None: the engine or a postprocess replica does.
        worker: the worker that runs it; None once the engine has finished, and during a migration.
        post: the postprocess replica; None while it waits for one.
        waiting_since: when it began to wait for a postprocess replica.
        tokens: all tokens generated so far, by all of its workers.
        resumed: how many of the tokens came from earlier workers.
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
        attempt_cached: cached prompt tokens on the current worker; None until prefill completes.
        computed: whether prefill has completed on any worker.
        active: whether text has arrived since the last sweep.
        tokens_at_last_sweep: number of tokens at the last sweep.
    """

    __slots__ = (
        "active",
        "attempt_cached",
        "booked_from",
        "cached_tokens",
        "completion_tokens",
        "computed",
        "context",
        "custom_text",
        "degraded",
        "end",
        "expiry",
        "first_text_at",
        "handed_over",
        "index",
        "logprob_positions",
        "losses",
        "max_tokens",
        "migration_task",
        "migrations",
        "pair",
        "post",
        "prompt",
        "prompt_ids",
        "prompt_positions",
        "reasoning_tokens",
        "recovery",
        "replays",
        "request",
        "reservation_id",
        "resumed",
        "sent",
        "sink",
        "slot",
        "span",
        "started_at",
        "text_sent",
        "tokens",
        "tokens_at_last_sweep",
        "waiting_since",
        "worker",
        "worker_span",
    )

    def __init__(
        self,
        slot: int,
        request: GenerationRequest,
        index: int,
        prompt: TokenizedPrompt,
        max_tokens: int,
        sink: Sink,
        context: RequestContext,
        recovery: RecoveryPolicy,
        custom_text: TextLink | None = None,
    ) -> None:
        self.slot = slot
        self.request = request
        self.index = index
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.sink = sink
        self.context = context
        self.recovery = recovery
        self.custom_text = custom_text
        self.expiry: asyncio.TimerHandle | None = None
        self.worker: WorkerLink | None = None
        self.reservation_id = ""
        self.post: TextLink | None = None
        self.waiting_since = 0.0
        self.tokens = array("I")
        self.resumed = 0
        self.booked_from = 0
        self.logprob_positions = 0
        self.prompt_positions = 0
        self.prompt_ids = None if prompt.raw is None else array("I")
        self.pair: Pair | None = None
        self.handed_over = False
        self.text_sent = 0
        self.sent = Sent()
        self.end: EngineEnd | None = None
        self.migrations = 0
        self.losses: dict[str, Loss] = {}
        self.replays = 0
        self.migration_task: asyncio.Task[None] | None = None
        self.cached_tokens = 0
        self.attempt_cached: int | None = None
        self.computed = False
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.degraded: tuple[str, ...] = ()
        self.active = True
        self.tokens_at_last_sweep = 0
        self.started_at = perf_counter()
        self.first_text_at = 0.0
        self.span: Span | None = None
        self.worker_span: Span | None = None

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

    def attach(self, worker: WorkerLink, route: Route) -> None:
        """Assigns the stream to a worker with a new reservation."""
        self.worker = worker
        self.reservation_id = route.reservation_id
        self.attempt_cached = None
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
